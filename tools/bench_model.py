"""Time steps of a Llama-shaped model by torch and with cutegen's layers, in the same interleaved rounds.

    python tools/bench_model.py --size 8B --out docs/results/model.json

Decoding and prefill run in CUDA graphs, training eagerly; weights are random, in bf16. Of each step of
inference, the GEMMs are timed alone as well, in their order and with their own weights. With torch.compile,
every block is compiled by Inductor's default and by the backend ``cutegen``. Kernels are chosen as the
dispatch table says, or tuned before with ``--autotune``; all are compiled before anything is timed. Results
of both are compared before they are timed. The part ``autotune`` takes the seconds of
``cutegen.autotune`` for two layers of the model, with an empty cache folder and once more. Render the file
with tools/results_table.py.

With ``--wait-for FILE`` everything is compiled first, while other work may go on, and nothing is timed before
the file is there. The table is then read again, which graphs that are captured by then do not follow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build.store import Store, file_digest
from cutegen.cli.args import add_cache_argument, positive_float, positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import present_device
from cutegen.measure.statistics import median_interval, ratio_interval
from cutegen.records.table import Table
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import check_facts
from tools.benchmark.model_table import APART, BESIDE, COMPILED, GEMMS, LINEAR, MODEL, OVERLAP, STEP
from tools.benchmark.overlapping_winners import with_overlap
from tools.benchmark.results import write_json

#: What may be measured, by default in this order.
PARTS = ("decode", "prefill", "training", "compiled", "compiled_training", "memory", "autotune")
#: Numbers of rows that the model is tuned for, where the seconds of that are measured.
TUNED_ROWS = (64, 2048)
TORCH = "torch"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_out_argument(parser, required=True)
    parser.add_argument("--size", default="8B", help="of examples/llama.py (%(default)s)")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="0, all of them, by default")
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="A,B", help=f"of {','.join(PARTS)}")
    parser.add_argument("--decode", type=_counts, default=(1, 8, 64), metavar="N,...", help="texts, or none")
    parser.add_argument("--context", type=positive_int, default=1024, help="places of a text (%(default)s)")
    parser.add_argument(
        "--prefill", type=_counts, default=(2048, 8192), metavar="N,...", help="tokens, or none"
    )
    parser.add_argument("--training", type=positive_int, default=8192, metavar="N", help="tokens")
    parser.add_argument("--training-layers", type=positive_int, default=4, metavar="N")
    parser.add_argument("--compiled-layers", type=positive_int, default=4, metavar="N")
    parser.add_argument("--rounds", type=positive_int, default=21)
    parser.add_argument("--settle", type=positive_float, default=0.5, help="seconds of turns before (0.5)")
    parser.add_argument("--autotune", type=positive_float, metavar="SECONDS", help="tune before, so long")
    parser.add_argument(
        "--tuned-for",
        choices=CONTEXTS,
        default=DEFAULT_CONTEXT,
        help="launch context of tuning (%(default)s)",
    )
    parser.add_argument("--gates-apart", action="store_true", help="also compile with gates left to Inductor")
    parser.add_argument("--wait-for", type=Path, metavar="FILE", help="compile, and time when it is there")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="the dispatch table to ask")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE.json", help="time optimized inference with this table as well"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="and with the same winners, all overlapping their neighbours"
    )
    add_cache_argument(parser, "compiled kernels")
    add_commit_argument(parser)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


def _counts(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(positive_int(part) for part in text.split(","))


def _parts(text: str) -> tuple[str, ...]:
    if unknown := set(text.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    return tuple(dict.fromkeys(text.split(",")))


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    device = present_device()
    facts: dict[str, Json] = {
        **check_facts(MODEL, device, args.commit),
        "model": {"size": args.size, "layers": args.layers, "context": args.context},
        "rounds": args.rounds,
        "settle_s": args.settle,
        "table": "" if args.table is None or not args.table.exists() else file_digest(args.table),
    }
    bench = ModelBench(args, facts)
    for part in args.parts:
        getattr(bench, part)()
    bench.finish()
    return EXIT_OK


class ModelBench:
    """Measures the parts, and writes the file after each row.

    Args:
        args: Of the command line.
        facts: What the file says beside its rows.
        device: Where the model is.
    """

    def __init__(self, args: argparse.Namespace, facts: dict[str, Json], device: str = "cuda") -> None:
        from cutegen.runtime.dispatch import Dispatcher
        from cutegen.runtime.kernel_cache import Kernels
        from cutegen.torch_ops import gemm, settings
        from tools.benchmark import model_steps

        self._args, self._facts, self._device, self._steps = args, facts, device, model_steps
        self._rows: list[Json] = []
        self._waiting: list[Callable[[], None]] = []
        if device == "cuda":  # elsewhere tests have chosen what the operators ask
            kernels = Kernels(Store.at(args.cache_dir), build="allow")
            gemm.use(Dispatcher(kernels=kernels))
        if args.autotune is not None:
            self._facts["tuning"] = self._tune(args.autotune)
        elif args.table is not None:
            settings.load_table(args.table)

    def decode(self) -> None:
        """One token of each text, by the number of texts."""
        self._infer_all(("decode",))

    def prefill(self) -> None:
        """A text, by the number of its tokens."""
        self._infer_all(("prefill",))

    def training(self) -> None:
        """Gradients of a few layers, eager."""
        import cutegen

        layers, length = self._args.training_layers, self._args.training
        models = {who: self._model(layers) for who in (TORCH, LINEAR, STEP)}
        model = models[TORCH]
        self._prepare(model, self._steps.training(model, length), backward=True)
        cutegen.optimize(models[LINEAR], is_linear)
        cutegen.optimize(models[STEP])
        steps = {who: self._steps.training(each, length) for who, each in models.items()}
        self._row(f"training {length}", model, steps)

    def compiled(self) -> None:
        """Decoding and prefill, with each block compiled by Inductor's default and by the backend."""
        model = self._model(self._args.compiled_layers)
        for name, step in self._inference(model, ("decode", "prefill")):
            self._prepare(model, step, addends=True)
            graphs = {}
            for who, backend in self._backends().items():
                with compiled_by(model, backend, self._steps):
                    graphs[who] = self._steps.Captured(step)
            self._row(name, model, graphs)

    def compiled_training(self) -> None:
        """Gradients of a few layers, each block compiled by Inductor's default and by the backend."""
        import torch

        args = self._args
        model = self._model(args.training_layers)
        self._prepare(model, self._steps.training(model, args.training), backward=True, addends=True)
        torch._dynamo.reset()
        steps = {}
        for who, backend in self._backends().items():
            copy = self._model(args.training_layers)
            self._steps.compiled_blocks(copy, backend)
            steps[who] = self._steps.training(copy, args.training)
        self._row(f"training {args.training}", model, steps)

    def memory(self) -> None:
        """Bytes that torch holds before and after a thousand steps of mixed lengths, ``reduce-overhead``."""
        from cutegen.torch_ops.inductor import compile_with_cutegen

        model = self._model(2)
        self._facts["memory"] = found = self._steps.memory_of_mixed_steps(model, compile_with_cutegen)
        print(f"memory: {found}", flush=True)
        self._write()

    def autotune(self) -> None:
        """Seconds of ``cutegen.autotune`` for the products of all layers, with nothing known and with all.

        Two layers have the same products as all of them. Compiled kernels, trials and table begin empty.
        """
        from cutegen.runtime.dispatch import Dispatcher
        from cutegen.runtime.kernel_cache import Kernels
        from cutegen.torch_ops import gemm

        model, before = self._model(2), gemm.default_dispatcher()
        with TemporaryFolder() as folder:
            if self._device == "cuda":
                gemm.use(Dispatcher(kernels=Kernels(Store(folder.path / "cache"), build="allow")))
            try:
                found = [self._autotuned(model), self._autotuned(model)]
            finally:
                gemm.use(before)
        self._facts["autotune"] = {"rows": list(TUNED_ROWS), "cold": found[0], "known": found[1]}
        self._write()

    def _autotuned(self, model: Any) -> dict[str, Json]:
        """Tune what the operators' table does not answer, and return how long that took."""
        import cutegen

        args = self._args
        step = self._steps.decode_inputs(model, args.size, TUNED_ROWS[0], args.context)
        begun = time.monotonic()
        found = cutegen.autotune(model, *step, m=TUNED_ROWS[1:])
        seconds = time.monotonic() - begun
        products = [gain for gain in found.gains if gain.problem.family == "gemm"]
        facts: dict[str, Json] = {
            "seconds": round(seconds, 2),
            "problems": len(found.gains),
            "products": len(products),
            "tuned": len(found.tuned),
            "failed": {str(problem): reason for problem, reason in found.failed.items()},
            "ratio_to_default": _digits(found.ratio_to_default),
            "ratio_to_baseline": _digits(found.ratio_to_baseline),
        }
        print(f"autotune: {facts}", flush=True)
        return facts

    def _model(self, layers: int) -> Any:
        return self._steps.make_model(self._args.size, layers, self._device)

    def _inference(self, model: Any, parts: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the steps of inference of these parts, with their names."""
        args = self._args
        if "decode" in parts:
            for texts in args.decode:
                yield f"decode {texts}", self._steps.decode(model, args.size, texts, args.context)
        if "prefill" in parts:
            for length in args.prefill:
                yield f"prefill {length}", self._steps.prefill(model, length)

    def _infer_all(self, parts: Sequence[str]) -> None:
        model = self._model(self._args.layers)
        for name, step in self._inference(model, parts):
            self._infer(name, model, step)

    def _backends(self) -> dict[str, Any]:
        from cutegen.torch_ops.inductor import compile_with_cutegen

        found = {TORCH: "inductor", COMPILED: compile_with_cutegen}
        return {**found, APART: _gates_apart} if self._args.gates_apart else found

    def _infer(self, name: str, model: Any, step: Callable[[], Any]) -> None:
        """Measure a step of inference: its GEMMs alone, and all of it with more or less of it swapped."""
        import torch

        import cutegen

        answers = self._prepare(model, step)
        own = self._steps.gemms(model, step, cutegen.linear)
        products = {TORCH: self._steps.gemms(model, step, torch.nn.functional.linear), GEMMS: own}
        self._row(name, model, {w: self._steps.Captured(s) for w, s in products.items()}, answers=answers)
        graphs = {TORCH: self._steps.Captured(step)}
        for what, wanted in ((LINEAR, is_linear), (STEP, None)):
            with swapped(model, wanted):
                graphs[what] = self._steps.Captured(step)
        if self._args.beside is not None:
            graphs[BESIDE] = self._captured_with(self._args.beside, model, step)
        if self._args.overlap:
            with TemporaryFolder() as folder:
                path = folder.path / "overlapping.json"
                self._overlapping_table().save(path)
                graphs[OVERLAP] = self._captured_with(path, model, step)
        self._row(name, model, graphs)

    def _captured_with(self, table: Path, model: Any, step: Callable[[], Any]) -> Any:
        """Return a graph of an optimized step as another table answers it."""
        with self._asking(table):
            self._prepare(model, step)
            with swapped(model, None):
                return self._steps.Captured(step)

    def _overlapping_table(self) -> Table:
        """Return the operators' table with all winners overlapping their neighbours.

        Raises:
            UsageError: They ask none.
        """
        from cutegen.torch_ops import gemm

        dispatcher = gemm.default_dispatcher()
        table = dispatcher.table()
        if table is None:
            raise UsageError("--overlap needs winners: give --table or --autotune")
        return with_overlap(table, dispatcher.arch())

    @contextmanager
    def _asking(self, table: Path) -> Iterator[None]:
        """Let the operators ask another table for as long as the block takes."""
        from cutegen.torch_ops import gemm, settings

        before = gemm.default_dispatcher()
        settings.load_table(table)
        try:
            yield
        finally:
            gemm.use(before)

    def _prepare(
        self, model: Any, step: Callable[[], Any], *, backward: bool = False, addends: bool = False
    ) -> dict[str, Json]:
        """Compile the kernels of a step, and return how each of its GEMMs is answered."""
        import cutegen
        from cutegen.families.registry import parse_problem
        from cutegen.torch_ops import gemm

        calls = self._steps.problems(model, step, backward=backward)
        if self._device == "cuda":
            lines = [*calls, *(_with_addends(calls, model) if addends else ())]
            cutegen.warmup(problems=[*lines, *self._steps.problems_between(model, step, backward=backward)])
        dispatcher = gemm.default_dispatcher()
        answers = {line: dispatcher.explain(parse_problem(line)) for line in calls}
        return {
            line: {"calls": calls[line], "how": answer.how, "config": str(answer.config or "torch")}
            for line, answer in answers.items()
        }

    def lines(self) -> list[str]:
        """Return the GEMMs of all parts, each once, in the order of the parts; no memory is needed for it."""
        args, steps = self._args, self._steps
        model = steps.make_model(args.size, 1, "meta")
        parts = ("decode", "prefill") if "compiled" in args.parts else args.parts
        asked = [step for _, step in self._inference(model, parts)]
        found = {line: None for step in asked for line in steps.problems(model, step)}
        gated = [line for step in asked for line in steps.gated_products(model, step)]
        if "compiled" in args.parts:
            found.update(dict.fromkeys(_with_addends(found, model)))
        if "training" in args.parts or "compiled_training" in args.parts:
            step = steps.training(model, args.training)
            trained = steps.problems(model, step, backward=True)
            found.update(dict.fromkeys(trained))
            gated += [f"{line} pre" for line in steps.gated_products(model, step)]
            if "compiled_training" in args.parts:
                found.update(dict.fromkeys(_with_addends(trained, model)))
        return [*found, *dict.fromkeys(gated)]

    def _between(self) -> list[str]:
        """Return what steps with cutegen's layers call between their products: norms, gates, embeddings."""
        import cutegen

        args, model = self._args, self._model(2)
        asked = [step for _, step in self._inference(model, args.parts)]
        for step in asked:
            self._prepare(model, step)
        if "training" in args.parts:
            asked.append(self._steps.training(model, args.training))
            self._prepare(model, asked[-1], backward=True)
        with swapped(model, None), cutegen.record() as recording:
            for step in asked:
                step()
        problems = {call.problem for call in recording.calls}
        return sorted(str(p) for p in problems if p.family not in ("gemm", "gated_gemm"))

    def _tune(self, budget_s: float) -> dict[str, Json]:
        """Tune the problems of all parts that the table does not answer, and use the answers."""
        from cutegen.families.registry import parse_problem
        from cutegen.torch_ops import gemm, settings
        from cutegen.tuning import AutoTuner

        args = self._args
        if args.table is not None and args.table.exists():
            settings.load_table(args.table)
        problems = [parse_problem(line) for line in (*self.lines(), *self._between())]
        begun, dispatcher = time.monotonic(), gemm.default_dispatcher()
        problems.sort(key=lambda problem: -problem.flops)  # the budget may end
        missing = [p for p in problems if dispatcher.explain(p).how not in ("exact", "range")]
        without, known, products = missing, len(problems) - len(missing), dict[str, Json]()
        with AutoTuner(
            cache_dir=args.cache_dir, table=args.table, effort="quick", context=args.tuned_for
        ) as tuner:
            for _ in range(2):  # the first compilations may take longer than the share of one problem
                left = max(budget_s - (time.monotonic() - begun), 0.1 * budget_s)
                stakes = [float(problem.flops) for problem in without]
                results = tuner.tune_all(without, budget_s=left, stakes=stakes) if without else ()
                without = []
                for result in results:
                    if _said(result, begun):
                        without.append(result.problem)
                    else:
                        products[str(result.problem)] = _evidence(result)
            table = tuner.setting.table
        if table is not None and table.exists():
            settings.load_table(table)
        seconds = round(time.monotonic() - begun, 1)
        failed: list[Json] = [str(problem) for problem in without]
        counts: dict[str, Json] = {"known": known, "tuned": len(missing) - len(failed), "failed": failed}
        return {"context": args.tuned_for, **counts, "seconds": seconds, "products": products}

    def _row(
        self,
        name: str,
        model: Any,
        steps: Mapping[str, Callable[[], Any]],
        *,
        answers: dict[str, Json] | None = None,
    ) -> None:
        """Compare results with torch's, measure all in turns, print and write a row for each but torch.

        If there is something to wait for, only the comparison is made now, for which all is compiled.
        """
        measure = partial(self._measure, name, model, steps, answers)
        if self._args.wait_for is None:
            measure()
            return
        self._compare(name, steps)
        print(f"compiled: {name}, {', '.join(steps)}", flush=True)
        self._waiting.append(measure)

    def finish(self) -> None:
        """Measure what waits, when it may."""
        if not self._waiting:
            return
        while not self._args.wait_for.exists():
            time.sleep(0.05)
        if self._args.table is not None:
            from cutegen.torch_ops import settings

            settings.load_table(self._args.table)
            self._facts["table"] = file_digest(self._args.table)
        while self._waiting:
            self._waiting.pop(0)()

    def _compare(self, name: str, steps: Mapping[str, Callable[[], Any]]) -> None:
        results = {who: step() for who, step in steps.items()}
        for what in steps:
            if what != TORCH and results[TORCH] is not None:
                self._steps.require_close(results[what], results[TORCH], f"{name}, {what}")

    def _measure(
        self,
        name: str,
        model: Any,
        steps: Mapping[str, Callable[[], Any]],
        answers: dict[str, Json] | None,
    ) -> None:
        self._compare(name, steps)
        samples = self._steps.timed(steps, self._args.rounds, self._args.settle)
        for what in [who for who in steps if who != TORCH]:
            ratio = ratio_interval(samples[TORCH], samples[what])
            row: dict[str, Json] = {
                "name": name,
                "what": what,
                "layers": len(model.blocks),
                "torch_us": _rounded(median_interval(samples[TORCH]), 2),
                "cutegen_us": _rounded(median_interval(samples[what]), 2),
                "ratio": _rounded(ratio, 4),
            }
            self._rows.append({**row, **({"answers": answers} if answers else {})})
            print(f"{ratio.mid:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]  {name}, {what}", flush=True)
        self._write()

    def _write(self) -> None:
        write_json(self._args.out, {**self._facts, "rows": list(self._rows)})


def _gates_apart(module: Any, inputs: Any) -> Any:
    """Compile a graph by the backend, but for gates."""
    from torch._inductor.compile_fx import compile_fx

    import cutegen

    return compile_fx(module, inputs, config_patches=cutegen.inductor_options(gates=False))


def _said(result: Any, begun: float) -> bool:
    """Print what tuning one problem came to, and return whether it has no winner."""
    found = getattr(result, "error", None) or f"{result.time_us} us"
    print(f"{time.monotonic() - begun:.1f} s: {result.problem}: {found}", flush=True)
    return hasattr(result, "error")


def _evidence(result: Any) -> dict[str, Json]:
    """Return what tuning one problem measured: beside torch, above 1 cutegen is faster."""
    ratio = None if result.ratio is None else _rounded(result.ratio, 4)
    return {"us": result.time_us, "ratio": ratio, "config": str(result.config)}


def _with_addends(lines: Iterable[str], model: Any) -> list[str]:
    """Return the GEMMs of two layers of each block as the backend fuses the additions behind them."""
    width = model.head.weight.shape[1]
    return [f"{line} beta" for line in lines if f"x{width}x" in line and line.endswith(" kk")]


def _digits(ratio: float | None) -> Json:
    return None if ratio is None else round(ratio, 4)


def _rounded(interval: Any, digits: int) -> list[Json]:
    return [round(value, digits) for value in (interval.low, interval.mid, interval.high)]


def is_linear(module: Any, name: str) -> bool:
    """Return whether a module is a linear layer."""
    return hasattr(module, "in_features")


@contextmanager
def swapped(model: Any, wanted: Callable[[Any, str], bool] | None) -> Iterator[None]:
    """Let layers of a model call cutegen for as long as the block takes, those that are wanted."""
    import cutegen

    cutegen.optimize(model, wanted)
    try:
        yield
    finally:
        cutegen.restore(model)


@contextmanager
def compiled_by(model: Any, backend: Any, steps: Any) -> Iterator[None]:
    """Compile the blocks of a model by a backend for as long as the block takes."""
    import torch

    torch._dynamo.reset()
    steps.compiled_blocks(model, backend)
    try:
        yield
    finally:
        steps.compiled_blocks(model, None)


if __name__ == "__main__":
    sys.exit(main())
