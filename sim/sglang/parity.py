"""Replay a recorded SGLang case and say in words where the simulator first differs.

The format of a case is described in docs/parity.md. Iterations are counted as the recording driver
counts them: one plan and, with overlap, the reading of the batch before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sim.ledger import Ledger
from sim.policies import load
from sim.policy import Policy
from sim.sglang.cache import SglangCache
from sim.sglang.content import content_of
from sim.sglang.options import SglangOptions
from sim.sglang.request import Live
from sim.sglang.scheduler import Batch, Scheduler
from sim.sglang.tree import Node
from traces.identity import identify
from traces.trace import Request, Run, Trace, from_requests

SEGMENT = 1 << 32
NOT_OPTIONS = ("mode", "tree_core", "max_states_per_path")
PATIENCE = 4


def compare(case: dict[str, Any], oracle: dict[str, Any], version: str) -> list[str]:
    """Differences between the recording and the simulator, request by request; empty if none."""
    return list(_differences(oracle, Replay(case, version).run()))


def _differences(want: dict[str, Any], got: dict[str, Any]) -> Iterator[str]:
    for name in want["finish_order"]:
        a = next(r for r in want["requests"] if r["id"] == name)
        yield from _request_difference(a, got)
    for a in want["requests"]:
        if a["id"] not in want["finish_order"]:
            yield from _request_difference(a, got)
    for key, value in want.items():
        if key != "requests" and value != got[key]:
            yield f"{key}: recorded {value}, simulated {got[key]}"


def _request_difference(a: dict[str, Any], got: dict[str, Any]) -> Iterator[str]:
    b = next(r for r in got["requests"] if r["id"] == a["id"])
    for key in a.keys() | b.keys():
        if a.get(key) != b.get(key):
            yield f"request {a['id']}, {key}: recorded {a.get(key)}, simulated {b.get(key)}"


def options_of(config: dict[str, Any], version: str) -> SglangOptions:
    """Engine options of a case."""
    fields = {k: v for k, v in config.items() if k not in NOT_OPTIONS}
    fields["schedule_policy"] = fields.pop("policy", "fcfs")
    fields["tree"] = fields.get("tree", "mamba" if version == "0.5.18" else "unified")
    return SglangOptions(version=version, **fields)


def policy_of(config: dict[str, Any]) -> Policy:
    """The policy that a case's path cap stands for."""
    cap = config.get("max_states_per_path", -1)
    return load("path-capped", cap=cap) if cap > 0 else load("semantic-only")


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
        )
        for r in requests
    )


def token(seed: int, j: int) -> int:
    """The recording driver's token ``j`` of segment ``seed``; only orders children in a tree."""
    return (seed * 1000003 + j * 7919) % 50000 + 100


@dataclass
class Replay:
    """Drives the scheduler through one case, iteration by iteration."""

    case: dict[str, Any]
    version: str

    def __post_init__(self) -> None:
        self.rows = self.case["requests"]
        self.options = options_of(self.case["config"], self.version)
        policy = policy_of(self.case["config"])
        self.cache = SglangCache(self.options, policy, None, Ledger(on=False))
        self.cache.inserts = []
        self.tree = self.cache.tree
        self.scheduler = Scheduler(self.cache, self._charge)
        trace = trace_of(self.rows)
        prefixes = identify(trace)
        self.live = [
            Live(i, p, o, content_of(prefixes, i), self.tree.root)
            for i, (p, o) in enumerate(
                zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
            )
        ]
        self.record = [
            {
                "id": row["id"], "prompt_len": r.prompt, "output_len": r.target, "admissions": [],
                "inserts": [], "evicted_kv": 0, "evicted_states": 0, "cap_dropped_states": 0,
                "retracted": 0,
            }
            for row, r in zip(self.rows, self.live, strict=True)
        ]  # fmt: skip
        self.it = 0
        self.done: list[str] = []
        self.retractions: list[list[Any]] = []
        self.charged = (0, 0, 0)
        self.reading = False

    # ---------------------------------------------------------------- the loop
    def run(self) -> dict[str, Any]:
        """Every recorded field, simulated."""
        if self.case["config"].get("mode", "serial") == "serial":
            for r in self.live:
                self._serve_alone(r)
        else:
            self._serve_all()
        return {
            "requests": self.record,
            "finish_order": self.done,
            "retractions": self.retractions,
            "iterations": self.it,
            "evicted_kv_total": self.tree.evicted_kv,
            "evicted_states_total": self.tree.evicted_states,
            "cap_dropped_total": self.cache.policy_dropped,
            "final": self._snapshot(),
        }

    def _serve_alone(self, r: Live) -> None:
        self.scheduler.arrive(r)
        idle = 0
        while True:
            idle = 0 if self._iterate() else idle + 1
            if self._idle():
                break
            if idle > PATIENCE:
                self.record[r.index]["stuck"] = True
                self.scheduler.waiting.queue = []
                break
        self.record[r.index]["after"] = self._snapshot()

    def _serve_all(self) -> None:
        coming = sorted(self.live, key=lambda r: self.rows[r.index].get("at", 0))
        seen = idle = 0
        while coming or not self._idle():
            while coming and self.rows[coming[0].index].get("at", 0) <= self.it:
                self.scheduler.arrive(coming.pop(0))
            idle = 0 if self._iterate() else idle + 1
            for name in self.done[seen:]:
                self._record_of(name)["after"] = self._snapshot()
            seen = len(self.done)
            if idle > PATIENCE and self.scheduler.waiting.queue and not coming:
                for r in self.scheduler.waiting.queue:
                    self.record[r.index]["stuck"] = True
                break

    def _record_of(self, name: str) -> dict[str, Any]:
        return next(r for r in self.record if r["id"] == name)

    def _idle(self) -> bool:
        s = self.scheduler
        going_on = any(not r.finished for r in s.running)
        return not (s.waiting.queue or s.cut or s.last or s.flights or going_on)

    def _iterate(self) -> bool:
        s = self.scheduler
        last = s.last
        aborted = len(s.aborted)
        batch = s.plan()
        self._note_plan(batch)
        for r in s.aborted[aborted:]:
            self.record[r.index]["aborted"] = True
        read = last is not None if self.options.overlap else batch is not None
        if read:
            self._read()
        self.it += 1
        return batch is not None or bool(s.flights)

    # ---------------------------------------------------------------- what is noted
    def _charge(self, r: Live | None) -> None:
        """Evictions since the last call go to ``r``; states dropped by the cap only in a read."""
        now = (self.tree.evicted_kv, self.tree.evicted_states, self.cache.policy_dropped)
        if r is not None:
            row = self.record[r.index]
            row["evicted_kv"] += now[0] - self.charged[0]
            row["evicted_states"] += now[1] - self.charged[1]
            if self.reading:
                row["cap_dropped_states"] += now[2] - self.charged[2]
        self.charged = now

    def _note_plan(self, batch: Batch | None) -> None:
        self._note_inserts()
        for r in batch.retracted if batch else ():
            self.record[r.index]["retracted"] += 1
            self.retractions.append([self.it, self.record[r.index]["id"]])
        for r in batch.admitted if batch else ():
            self.record[r.index]["admissions"].append(
                {
                    "fill_len": r.fill, "matched_kv": r.matched, "hit": r.prefix,
                    "branching": r.branch, "it": self.it, "chunk_end": r.end,
                }
            )  # fmt: skip

    def _note_inserts(self) -> None:
        assert self.cache.inserts is not None
        for r, length, already, outcome, kind, up_to in self.cache.inserts:
            self.record[r.index]["inserts"].append(
                {"len": length, "already": already, "state": outcome, "kind": kind, "up_to": up_to}
            )
        self.cache.inserts.clear()

    def _read(self) -> None:
        self.reading = True
        finished = self.scheduler.read()
        self.reading = False
        for r in finished:
            self.record[r.index]["finished_it"] = self.it
            self.done.append(self.record[r.index]["id"])
        self._note_inserts()

    # ---------------------------------------------------------------- snapshots
    def _snapshot(self) -> dict[str, Any]:
        tree, cache = self.tree, self.cache
        out: dict[str, Any] = {
            "tree": self._tree_rows(tree.root),
            "state_lru": [node.end for node in reversed(tree.states)],
        }
        if self.options.tree == "mamba":
            nodes = sorted(tree.nodes(), key=lambda node: -node.stamp)
            out["kv_lru"] = [node.end for node in nodes]
        out |= {
            "kv_free": cache.kv_free,
            "mamba_free": cache.slots.free,
            "kv_evictable": tree.kv_evictable_tokens,
            "states_cached": len(tree.states),
        }
        if cache.int8 is not None:
            out["int8_free"] = cache.int8.free
        return out

    def _tree_rows(self, node: Node) -> list[list[int]]:
        out = []
        for child in sorted(node.children.values(), key=self._first_tokens):
            row = [child.start, child.end, int(child.state), child.kv_locks, child.state_locks]
            out += [row, *self._tree_rows(child)]
        return out

    def _first_tokens(self, node: Node) -> list[int]:
        """The first four tokens of an edge, as the recording orders children."""
        content = node.content
        request = next(r for r in self.live if r.content is content)
        runs = [*self.rows[request.index]["prompt"], *self.rows[request.index]["output"]]
        out: list[int] = []
        skip = node.start
        for seed, length, *first in runs:
            start = first[0] if first else 0
            take = range(min(skip, length), min(length, skip + 4 - len(out)))
            out += [token(seed, start + j) for j in take]
            skip = max(0, skip - length)
            if len(out) == min(4, node.tokens):
                break
        return out[: node.tokens]
