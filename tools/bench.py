"""Times the replay and the hits-only pass, in CPU seconds of a process each.

    python tools/bench.py [--trace TRACE] [--runs N] [--json FILE]

Without --trace it uses ../shared/traces where that exists, else generated chat. Replay runs from
the first event to the last record in memory; imports and loading stand beside it, and how many
events SimPy's bare loop gives, since machines and hours differ.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

START = time.process_time()
DEFAULT = Path(__file__).parents[2] / "shared/traces/mooncake_conversation_trace.jsonl.gz"


def measure(trace_path: str | None, policy: str) -> dict[str, float]:
    """Everything in this process: imports, loading, hits only, full replay."""
    from experiments.config import Experiment, PolicyConfig, TraceConfig
    from experiments.engines import Point, host, options, serving, sized
    from experiments.simulate import load_trace
    from sim.cost import device as devices
    from sim.cost.modelled import ModelledBackend
    from sim.ledger import Ledger
    from sim.loop import replay, serial
    from sim.records import Hits, Records
    from sim.vllm.engine import VllmEngine

    out = {"imports_s": time.process_time() - START}
    chat = {"generator": "chat", "parameters": {"sessions": 8475}}
    arrivals = {"kind": "poisson", "rate": 2.4}
    trace_config = (
        TraceConfig(path=trace_path)
        if trace_path
        else TraceConfig.model_validate({**chat, "arrivals": arrivals})
    )
    experiment = Experiment(
        name="bench", description="", trace=trace_config, policies=[PolicyConfig(name=policy)]
    )
    point = Point(experiment, experiment.policies[0], (), 0)
    begin = time.process_time()
    trace, prefixes = load_trace(experiment.trace, 0)
    out["loading_s"] = time.process_time() - begin
    model, geometry = sized(experiment.model, serving(point))
    sync = experiment.engine.model_copy(update={"async_scheduling": False})
    engine = VllmEngine(trace, prefixes, geometry, _policy(policy), options(sync, "vllm-0.33"),
                        Ledger(on=False))  # fmt: skip
    begin = time.process_time()
    serial(engine, trace, Hits(trace))
    out["hits_only_s"] = time.process_time() - begin
    backend = ModelledBackend(model, devices.load("h200"))
    records = Records(trace)
    timed = host(point, trace, prefixes, Ledger()).engine
    begin = time.process_time()
    replay(timed, trace, backend, records, host_ns=backend.host_ns)
    out["replay_s"] = time.process_time() - begin
    out["simpy_events_per_s"] = simpy_events_per_s()
    out["requests"] = len(trace)
    out["steps"] = sum(row[1] for row in records.steps)
    out["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return out


def simpy_events_per_s(count: int = 300_000) -> float:
    """SimPy's bare loop on this machine now: what nothing built on it can pass."""
    import simpy

    def tick(env: simpy.Environment):  # type: ignore[no-untyped-def]
        for _ in range(count):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(tick(env))
    begin = time.process_time()
    env.run()
    return count / (time.process_time() - begin)


def _policy(name: str):  # type: ignore[no-untyped-def]
    from sim.policies import load

    return load(name)


def main() -> None:
    """Several runs, medians in a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default=str(DEFAULT) if DEFAULT.exists() else None)
    parser.add_argument("--policy", default="semantic-only")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--one", action="store_true", help="measure in this process, print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.trace, args.policy)))
        return
    command = [sys.executable, __file__, "--one", "--policy", args.policy]
    command += ["--trace", args.trace] if args.trace else []
    rows = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(args.runs)
    ]
    print(f"{Path(args.trace).name if args.trace else 'generated chat'}, {args.policy}, "
          f"median of {args.runs} processes")  # fmt: skip
    for key in rows[0]:
        values = [row[key] for row in rows]
        print(f"{key:>18} {statistics.median(values):12,.2f}   "
              f"({min(values):,.2f} to {max(values):,.2f})")  # fmt: skip
    for key in ("replay_s", "hits_only_s"):
        rate = rows[0]["requests"] / statistics.median(r[key] for r in rows)
        print(f"{key.removesuffix('_s'):>18} {rate:12,.0f} requests per CPU-second")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
