"""Replay a recorded vLLM case and say in words where the simulator first differs.

The format of a case is described in docs/parity.md. Steps are counted as the recording driver
counts them: an empty schedule is a step, and with async scheduling one step is always unread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sim.ledger import Ledger
from sim.policies import load
from sim.policy import Policy
from sim.step import Step
from sim.vllm.case_geometry import DEFAULTS, geometry_of_case, recorded_form
from sim.vllm.engine import VllmEngine
from sim.vllm.options import VllmOptions
from sim.vllm.planned import Plan
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

OPTION_DEFAULTS: dict[str, Any] = {
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 128,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "watermark": 0.0,
    "reserve_full_isl": True,
    "policy": "fcfs",
    "retention_interval": 0,
    "async_scheduling": False,
}
SEGMENT = 1 << 32


def compare(case: dict[str, Any], result: dict[str, Any], *, quiet: bool = True) -> list[str]:
    """Differences between the recording and the simulator, the first of each kind; empty if none.

    ``quiet`` False visits every request in every step, as the engine itself does.
    """
    version = str(result["vllm"])
    geometry = {k: v for k, v in result["geometry"].items() if k != "vllm"}
    ours = recorded_form(case["config"], version)
    out = [
        f"geometry {key}: recorded {geometry.get(key)}, simulated {ours.get(key)}"
        for key in sorted(geometry.keys() | ours.keys())
        if geometry.get(key) != ours.get(key)
    ]
    if out:
        return out
    return list(_differences(result, Replay(case, version, quiet).run()))


def _differences(want: dict[str, Any], got: dict[str, Any]) -> Iterator[str]:
    text = _step_difference(want["steps"], got["steps"])
    if text:
        yield text
    for a, b in zip(want["requests"], got["requests"], strict=True):
        for key, value in a.items():
            if _plain(value) != _plain(b.get(key)):
                yield f"request {a['id']}, {key}: recorded {value}, simulated {b.get(key)}"
                return
    for key in ("summary", "final"):
        for name, value in want[key].items():
            if _plain(value) != _plain(got[key][name]):
                yield f"{key} {name}: recorded {value}, simulated {got[key][name]}"
                return


def _step_difference(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> str:
    for a, b in zip(want, got, strict=False):
        for key, value in a.items():
            if _plain(value) != _plain(b.get(key)):
                return f"step {a['step']}, {key}: recorded {value}, simulated {b.get(key)}"
        if b.keys() - a.keys() - {"tables", "free_queue"}:
            return f"step {a['step']}: simulated also has {sorted(b.keys() - a.keys())}"
    if len(want) != len(got):
        return f"{len(want)} steps recorded, {len(got)} simulated"
    return ""


def _plain(value: Any) -> Any:
    """Tuples as lists, and token counts that a recording leaves open (None) dropped."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value if v is not None]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def policy_of(config: dict[str, Any]) -> Policy:
    """The policy that a case's ``mode`` and ``retention_interval`` stand for."""
    mode, interval = config["mode"], config["retention_interval"]
    if mode == "none":
        return load("none")
    if mode == "all":
        return load("all", retention_interval=interval)
    if interval == 0:
        return load("semantic-only")
    return load("align", retention_interval=interval)


def options_of(config: dict[str, Any], version: str) -> VllmOptions:
    """Engine options of a case."""
    caching = config["enable_prefix_caching"]
    if "M" in config["layers"] and config["mode"] == "none":
        caching = False
    return VllmOptions(
        version=".".join(version.split(".")[:2]),
        enable_prefix_caching=caching,
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        watermark=config["watermark"],
        reserve_full_isl=config["reserve_full_isl"],
        priority=config["policy"] == "priority",
        async_scheduling=config["async_scheduling"],
        num_speculative_blocks=config["num_speculative_blocks"],
    )


def trace_of(requests: list[dict[str, Any]]) -> Trace:
    """A case's requests; run ``[seed, length, first]`` names tokens of one long segment a seed."""

    def runs(rows: list[list[int]]) -> tuple[Run, ...]:
        return tuple(Run(r[0] * SEGMENT + (r[2] if len(r) > 2 else 0), r[1]) for r in rows if r[1])

    return from_requests(
        Request(
            id=r["id"],
            prompt=runs(r["prompt"]),
            output_tokens=sum(x[1] for x in r["output"]),
            output=runs(r["output"]),
            priority=r.get("priority", 0),
        )
        for r in requests
    )


@dataclass
class Replay:
    """Drives the engine through one case, step by step."""

    case: dict[str, Any]
    version: str
    quiet: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = {**DEFAULTS, **OPTION_DEFAULTS, **self.case["config"]}
        preset = self.case["config"].get("preset")
        if preset == "nemotron_h_8b":
            self.config["layers"] = "M*"  # only whether there are state layers matters here
        self.trace = trace_of(self.case["requests"])
        self.engine = VllmEngine(
            self.trace,
            identify(self.trace),
            geometry_of_case(self.case["config"], self.version),
            policy_of(self.config),
            options_of(self.config, self.version),
            Ledger(on=False),
        )
        self.pool = self.engine.cache.pool
        self.pool.evicted = []
        self.requests = [
            {
                "id": r["id"],
                "num_prompt_tokens": sum(x[1] for x in r["prompt"]),
                "num_output_tokens": sum(x[1] for x in r["output"]),
                "arrived": None,
                "admissions": [],
                "chunks": [],
                "preemptions": 0,
                "finished": None,
            }
            for r in self.case["requests"]
        ]
        self.finished: set[int] = set()
        self.pending = list(range(len(self.requests)))

    # ---------------------------------------------------------------- arrivals
    def _arrival(self, i: int) -> int:
        return self.case["requests"][i].get("arrival_step") or 0

    def _free_to_go(self, i: int) -> bool:
        names = self.case["requests"][i].get("after") or ()
        done = {self.requests[j]["id"] for j in self.finished}
        return all(name in done for name in names)

    def _last_arrival(self, step: int) -> bool:
        return all(self._arrival(i) <= step for i in self.pending)

    def _arrive(self, step: int) -> None:
        ready = [i for i in self.pending if self._arrival(i) <= step and self._free_to_go(i)]
        for i in ready:
            self.pending.remove(i)
            self.requests[i]["arrived"] = step
            self.engine.arrive(i)

    # ---------------------------------------------------------------- the loop
    def run(self) -> dict[str, Any]:
        """Every recorded field, simulated."""
        flying: deque[tuple[Plan, Step]] = deque()
        step = 0
        asynchronous = self.config["async_scheduling"]
        while True:
            self._arrive(step)
            if not self.engine.unfinished:
                while flying:
                    self.engine.commit(flying.popleft()[1])
                if not self.pending:
                    break
                following = [self._arrival(i) for i in self.pending if self._free_to_go(i)]
                step = max(step + 1, min(following))
                continue
            row, plan, planned = self._schedule(step)
            self.rows.append(row)
            if asynchronous:
                flying.append((plan, planned))
                if len(flying) < 2:
                    step += 1
                    continue
                planned = flying.popleft()[1]
            elif not row["scheduled"] and not plan.preempted and self._last_arrival(step):
                row["stuck"] = True
                break
            self._commit(planned, row, step)
            step += 1
        return self._result()

    def _schedule(self, step: int) -> tuple[dict[str, Any], Plan, Step]:
        assert self.pool.evicted is not None
        self.pool.evicted.clear()
        scheduler = self.engine.scheduler
        plan, planned = self.engine.plan_even_if_empty()
        tokens = dict(plan.scheduled.items())
        tokens |= dict.fromkeys(scheduler.quiet.values(), 1)
        if self.config["policy"] != "priority":
            tokens = dict(sorted(tokens.items(), key=lambda item: item[0].stamp))
        scheduled = [[self.requests[r.index]["id"], n] for r, n in tokens.items()]
        for r, n in tokens.items():
            end = r.computed + (scheduler.tick - r.tick0 if r.quiet else 0)
            self.requests[r.index]["chunks"].append([step, end - n, n])
        if self.quiet:
            scheduler.settle(planned)
            planned.repeat = 1
        for r, hit, _ in plan.admitted:
            self.requests[r.index]["admissions"].append(
                {"step": step, "cached_tokens": hit.tokens, "junction": hit.branch}
            )
        for r in plan.preempted:
            self.requests[r.index]["preemptions"] += 1
        groups = self.engine.cache.shape.num_groups
        row: dict[str, Any] = {
            "step": step,
            "scheduled": scheduled,
            "free": self.pool.num_free,
            "evicted": [[b, key % groups, n] for b, key, n in self.pool.evicted],
            "running": [self.requests[r.index]["id"] for r in scheduler.running],
            "waiting": [self.requests[r.index]["id"] for r in self._waiting()],
        }
        if plan.preempted:
            order = {r.index: r for r in plan.preempted}
            row["preempted"] = [self.requests[i]["id"] for i in self._live_order() if i in order]
        if self.case.get("options", {}).get("trace_tables"):
            row["tables"] = {
                self.requests[r.index]["id"]: self._tables(r) for r in scheduler.running
            }
            row["free_queue"] = ranges(list(self.pool.free))
        return row, plan, planned

    def _live_order(self) -> list[int]:
        """Requests in order of arrival, as the driver lists preempted ones."""
        arrived = [i for i, r in enumerate(self.requests) if r["arrived"] is not None]
        return sorted(arrived, key=lambda i: (self.requests[i]["arrived"], i))

    def _waiting(self) -> list[Any]:
        waiting = list(self.engine.scheduler.waiting)
        if self.engine.options.priority:
            waiting.sort(key=lambda r: (r.priority, r.seq))
        return waiting

    def _tables(self, r: Any) -> list[list[int]]:
        out = []
        for _, is_state, j in self.engine.cache.shape.order:
            if is_state:
                columns = range(r.state_columns)
                out.append([r.states[c][j] if c in r.states else 0 for c in columns])
            else:
                out.append(list(r.kv[j]) if r.kv else [])
        return out

    def _commit(self, planned: Step, row: dict[str, Any], step: int) -> None:
        for i in self.engine.commit(planned):
            self.finished.add(i)
            self.requests[i]["finished"] = step
        row["free_after"] = self.pool.num_free
        row["cached_keys"] = len(self.pool.where)

    def _result(self) -> dict[str, Any]:
        pool, groups = self.pool, self.engine.cache.shape.num_groups
        cached = sorted(
            [key % groups, b, pool.tokens[b]] for b, key in enumerate(pool.key) if key is not None
        )
        admitted = [r for r in self.requests if r["admissions"]]
        return {
            "requests": self.requests,
            "steps": self.rows,
            "summary": {
                "steps": len(self.rows),
                "prompt_tokens": sum(r["num_prompt_tokens"] for r in admitted),
                "cached_tokens": sum(r["admissions"][0]["cached_tokens"] for r in admitted),
                "scheduled_tokens": sum(n for s in self.rows for _, n in s["scheduled"]),
                "preemptions": sum(r["preemptions"] for r in self.requests),
                "evictions": sum(len(s["evicted"]) for s in self.rows),
            },
            "final": {"cached_blocks": cached, "free_queue": ranges(list(pool.free))},
        }


def ranges(ids: list[int]) -> list[Any]:
    """Block ids with ascending runs of three or more written as ``[first, last]``."""
    out: list[Any] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i < len(ids) and ids[i] == ids[i - 1] + 1:
            continue
        run = ids[start:i]
        out.extend([[run[0], run[-1]]] if len(run) > 2 else run)
        start = i
    return out
