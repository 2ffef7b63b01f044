"""An experiment file: every key, its type and its limits; errors name the line and the fix."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from experiments.cli_errors import UsageError

SHIPPED = Path(__file__).parent
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6,
         "GB": 10**9}  # fmt: skip


class Strict(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


EngineName = Literal[
    "vllm-0.33", "vllm-0.28", "sglang-0.5.23", "sglang-0.5.18", "pool", "marconi-artifact"
]


class SglangConfig(Strict):
    """SGLang's own flags, where an SGLang version hosts the policy; ``tree: mamba`` is
    ``MambaRadixCache``, of 0.5.18 only. Context length and dtypes are those of ``engine``, and so
    is the most that runs at once (``max_num_seqs``) where ``max_running_requests`` is not set."""

    mamba_radix_cache_strategy: Literal[
        "auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"
    ] = "auto"
    page_size: int = Field(1, ge=1)
    mamba_track_interval: int = Field(256, ge=1)
    mamba_full_memory_ratio: float = Field(0.9, gt=0)
    max_mamba_cache_size: int | None = Field(None, ge=1)
    chunked_prefill_size: int | None = Field(8192, ge=1)
    max_prefill_tokens: int = Field(16_384, ge=1)
    max_running_requests: int | None = Field(None, ge=1)
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight"] = "fcfs"
    disable_overlap_schedule: bool = False
    enable_int8_mamba_checkpoint: bool = False
    int8_mamba_ckpt_size: int | None = Field(None, ge=1)
    tree: Literal["unified", "mamba"] = "unified"
    skip_decode_lock: bool = False
    waiting_refresh: bool = True


class EngineConfig(Strict):
    """Engine version and scheduler settings, by vLLM's own names; SGLang's under ``sglang``."""

    version: EngineName = "vllm-0.33"
    sglang: SglangConfig = SglangConfig()
    async_scheduling: bool = True
    max_num_batched_tokens: int = Field(8192, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    max_model_len: int = Field(131_072, ge=2)
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = Field(0, ge=0)
    watermark: float = Field(0.0, ge=0, lt=1)
    reserve_full_isl: bool = True
    priority: bool = False
    prefix_match_unit: int | None = Field(None, ge=1)
    block_size: int | None = Field(None, ge=1)
    ssm_dtype: str = "auto"
    kv_dtype: str = "auto"


class HardwareConfig(Strict):
    """Device file and tensor parallelism."""

    device: str = "h200"
    tp: int = Field(1, ge=1)


class CostConfig(Strict):
    """Step times from a ``profile`` (a file, or a shipped one's name) instead of the device's data
    file. ``on_miss``: what to do with sizes that it lacks; ``measure`` times them on this machine
    and adds them to the file. ``accept`` takes a profile of other kernels or of another model."""

    profile: str | None = None
    on_miss: Literal["extrapolate", "measure", "refuse"] = "extrapolate"
    accept: list[Literal["other-kernels", "other-model"]] = []


class SizesConfig(Strict):
    """A hybrid as Marconi's artifact counts its bytes and FLOP, in place of ``model``: ``layers``
    of state, attention and MLP. Only the pool and the artifact take it."""

    layers: tuple[int, int, int] = (24, 4, 28)
    width: int = Field(4096, ge=1)
    state_width: int = Field(128, ge=1)


class ArrivalsConfig(Strict):
    """Arrivals for traces without times; ``rate`` in requests (session starts) a second."""

    kind: Literal["fixed", "poisson", "gamma", "closed_loop"]
    rate: float = Field(1.0, gt=0)
    cv: float = Field(1.0, gt=0)
    users: int = Field(1, ge=1)
    think_s: float = Field(0.0, ge=0)


class InlineRequest(Strict):
    """A request written in the file: its prompt, and its output where later prompts can go on from
    it, as ``[content, tokens]`` pairs. Without ``arrival_ns`` it starts when the one before it has
    finished."""

    id: str
    prompt: list[tuple[int, int]] = Field(min_length=1)
    output: list[tuple[int, int]] = []
    output_tokens: int = Field(1, ge=1)
    arrival_ns: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _as_long_as_its_output(self) -> InlineRequest:
        tokens = sum(n for _, n in self.output)
        if self.output and tokens != self.output_tokens:
            raise ValueError(f"output_tokens is {self.output_tokens}, its output has {tokens}")
        return self


class TraceConfig(Strict):
    """A file (``path``), a generator with its ``parameters``, or ``requests`` written out, each
    starting when the one before has finished; then arrivals. ``answers``: whether later prompts
    can share what was answered; ``unknown`` forgets it, ``known`` takes what the trace says, and
    infers it where a Mooncake file says nothing. Left out, the trace is taken as it is."""

    requests: list[InlineRequest] = []
    path: str | None = None
    generator: str | None = None
    parameters: dict[str, Any] = {}
    options: dict[str, Any] = {}
    answers: Literal["known", "unknown"] | None = None
    arrivals: ArrivalsConfig | None = None
    arrival_scale: float = Field(1.0, gt=0)
    limit: int | None = Field(None, ge=1)

    @field_validator("options", mode="before")
    @classmethod
    def _bare_on(cls, options: Any) -> Any:
        """YAML reads a bare on and off as true and false."""
        if isinstance(options, dict) and isinstance(options.get("infer_appends"), bool):
            return {**options, "infer_appends": "on" if options["infer_appends"] else "off"}
        return options


class PolicyConfig(Strict):
    """A shipped policy or a ``.py`` file; ``engine`` overrides the experiment's version and
    ``engine_settings`` any key below ``engine``, dotted or nested, for this entry alone."""

    name: str
    label: str | None = None
    engine: EngineName | None = None
    engine_settings: dict[str, Any] = {}
    parameters: dict[str, Any] = {}

    @property
    def shown(self) -> str:
        """What legends and tables call it."""
        if self.label:
            return self.label
        given = {**self.parameters, **self.engine_settings}
        extra = ", ".join(f"{k.split('.')[-1]}={v}" for k, v in given.items())
        where = f" ({self.engine})" if self.engine else ""
        return f"{self.name}{' ' + extra if extra else ''}{where}"


class PlotConfig(Strict):
    """One figure: ``y`` against ``x``, a line per ``series``, a panel per value of ``facet``."""

    file: str
    title: str
    source: Literal["summary", "requests"] = "summary"
    x: str
    y: str
    x_label: str
    y_label: str
    series: str = "policy"
    facet: str | None = None
    facet_labels: dict[str, str] = {}
    only: dict[str, list[Any]] = {}
    marks: dict[str, list[float]] = {}
    log_x: bool = False
    log_y: bool = False
    points: bool = False
    bars: bool = False
    from_zero: bool = True


class Range(Strict):
    """Values of an axis: ``from`` to ``to``, both included."""

    first: int = Field(alias="from")
    to: int
    step: int = Field(1, ge=1)

    def values(self) -> list[Any]:
        """The axis."""
        return list(range(self.first, self.to + 1, self.step))


class Experiment(Strict):
    """The whole file."""

    name: str
    description: str
    kind: Literal["replay", "hits", "geometry"] = "replay"
    model: str = "nemotron-h-8b"
    sizes: SizesConfig | None = None
    engine: EngineConfig = EngineConfig()
    hardware: HardwareConfig = HardwareConfig()
    cost: CostConfig = CostConfig()
    memory: str = "40GiB"
    request_tokens: int = Field(1, ge=1)
    trace: TraceConfig = TraceConfig()
    policies: list[PolicyConfig] = [PolicyConfig(name="semantic-only")]
    sweep: dict[str, list[Any] | Range] = {}
    seeds: list[int] = [0]
    table: list[str] = []
    table_only: dict[str, list[Any]] = {}
    ttft_limit_s: float = Field(2.0, gt=0)
    tpot_limit_s: float = Field(0.05, gt=0)
    plots: list[PlotConfig] = []
    # A case that `prefixlab check` printed: the engine is built as the checker built it.
    check: dict[str, Any] | None = None

    def axes(self) -> dict[str, list[Any]]:
        """Sweep axes with their values."""
        return {k: v.values() if isinstance(v, Range) else v for k, v in self.sweep.items()}


def memory_bytes(text: str) -> int:
    """``40GiB`` as bytes. Raises ``UsageError``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or (found[2] or "B") not in UNITS:
        raise UsageError(f"memory is {text!r}; allowed: a number and one of {', '.join(UNITS)}")
    return int(float(found[1]) * UNITS[found[2] or "B"])


def shipped() -> dict[str, Path]:
    """The experiments that come with prefixlab, by name."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.yaml"))}


def find(name: str) -> Path:
    """A file, or the name of a shipped experiment."""
    if Path(name).is_file():
        return Path(name)
    known = shipped()
    if name in known:
        return known[name]
    if Path(name).is_dir():
        raise UsageError(f"{name}: a folder; expected an experiment file or one of the shipped")
    near = difflib.get_close_matches(Path(name).stem, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"{name}: no such file, nor a shipped experiment ({', '.join(known)}){hint}")


def load(path: Path, overrides: list[str] | None = None) -> Experiment:
    """Read and check an experiment file; ``overrides`` are ``dotted.key=value``."""
    try:
        text = path.read_text(encoding="utf-8")
        tree, data = yaml.compose(text), yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise UsageError(f"{path}{where}: not YAML ({problem})") from None
    if not isinstance(data, dict):
        what = "an empty file" if data is None else type(data).__name__
        raise UsageError(f"{path}: an experiment is a mapping of keys, not {what}")
    for text in overrides or []:
        key, sign, value = text.partition("=")
        if not sign:
            raise UsageError(f"--set {text!r}: expected key=value, such as engine.max_num_seqs=64")
        put(data, key, yaml.safe_load(value))
    made = checked(data, str(path), tree)
    for key in made.sweep:
        put(made.model_dump(), key, None)
    return made


def checked(data: dict[str, Any], where: str, tree: Any = None) -> Experiment:
    """``data`` as an experiment; ``tree`` is its YAML, for line numbers. Raises ``UsageError``."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        problems = (_explain(where, tree, e) for e in error.errors())
        raise UsageError("\n".join(problems)) from None


def put(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``a.b.c`` in nested mappings. Raises ``UsageError`` if a part is not a mapping."""
    *parents, last = dotted.split(".")
    at: Any = data
    for part in parents:
        at = _inside(at, part, dotted)
    if not isinstance(at, dict):
        raise UsageError(f"key {dotted!r}: what holds {last!r} is not a mapping")
    at[last] = value


def _inside(at: Any, part: str, dotted: str) -> Any:
    if isinstance(at, list) and part.isdigit() and int(part) < len(at):
        return at[int(part)]
    if isinstance(at, dict):
        if at.get(part) is None:
            at[part] = {}
        return at[part]
    raise UsageError(f"key {dotted!r}: there is no {part!r} inside")


def _explain(where: str, tree: Any, error: Any) -> str:
    place = ".".join(str(p) for p in error["loc"])
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        known = _keys_at(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"unknown key{hint} Allowed: {', '.join(known)}"
    elif error["type"] != "missing":
        message = f"{message}, got {error.get('input')!r}"
    line = f":{_line(tree, error['loc'])}" if tree is not None else ""
    return f"{where}{line}: {place}: {message}"


def _keys_at(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Experiment
    for part in loc:
        if isinstance(part, str):
            field = model.model_fields[part].annotation
            args = [a for a in getattr(field, "__args__", (field,)) if a is not type(None)]
            model = args[0]
    return list(model.model_fields)


def _line(tree: Any, loc: tuple[Any, ...]) -> int:
    node, line = tree, 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(part)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line
