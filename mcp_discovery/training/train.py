"""Trains the discovery adapter: one LoRA that scores (tool, request) pairs and gives both their vectors.

A step merges the adapter into the frozen base, runs one batch and descends on

    score loss        cross-entropy of each right tool against the wrong ones of its group, on the
                      difference of the logits of yes and no, plus 0.3 x binary cross-entropy
    + match weight x  cross-entropy of each request's vector against the vectors of all tools in the
                      batch, cosine over 0.03

Everything a step draws is a function of the seed and the step's number, so that a run resumed from a
checkpoint goes on as if it had not stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from engine.errors import ModelError
from engine.tokenizer import Tokenizer
from engine.weights import Weights, load_weights
from mcp_discovery.discovery.prompts import VERSION, Prompts
from mcp_discovery.model_store import digest
from mcp_discovery.training.batches import Batch, BatchSize, StepBatches
from mcp_discovery.training.corpus import Corpus
from mcp_discovery.training.data import DataError, ToolSet, find_sets, load_set
from mcp_discovery.training.evaluate import Figures, evaluate, table
from mcp_discovery.training.forward import Decoder
from mcp_discovery.training.groups import GroupSampler, Mixture
from mcp_discovery.training.infer import Reader
from mcp_discovery.training.lora import Base, LoRA, adapter_bytes
from mcp_discovery.training.losses import matching_loss, probability_loss, ranking_loss
from mcp_discovery.training.mining import mine

MOST_ADAPTER_BYTES = 15_000_000

# Many real servers weigh more than a few, or than synthetic sets; a source is a set, or `set:tools` for
# requests made up from its tools. Sources not named here weigh 1.
DEFAULT_FACTORS: Mapping[str, float] = {
    "toucan_servers:tools": 2.6,
    "metatool:tools": 0.5,
    "sealtools": 0.55,
    "sealtools:tools": 0.6,
    "acebench_en": 0.7,
    "acebench_en:tools": 0.6,
    "apibank": 0.5,
    "arcade": 0.6,
}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    model: Path  # GGUF file or safetensors folder of the base
    steps: int | None = None  # of optimisation; one of steps and seconds must be given
    seconds: float | None = None  # of wall clock for the whole run, final evaluation included
    rank: int = 24
    alpha: float = 48.0
    learning_rate: float = 5e-4
    warmup: float = 0.03  # of the run
    last_rate: float = 0.02  # of the learning rate, at the end
    weight_decay: float = 0.01
    clip: float = 1.0
    probability_weight: float = 0.3
    match_weight: float = 0.5
    temperature: float = 0.03
    size: BatchSize = field(default_factory=BatchSize)
    mixture: Mixture = field(default_factory=Mixture)
    factors: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_FACTORS))
    seed: int = 0
    mine_at: tuple[float, ...] = (0.12, 0.4, 0.7)  # of the run
    evaluate_at: tuple[float, ...] = (0.5,)  # of the run, besides its end
    dev: tuple[Path, ...] = ()  # sets to evaluate on
    evaluate_queries: int = 400  # of a set, at the end; a third of it on the way
    device: str = "auto"
    workers: int = 0  # processes that prepare batches
    compiled: bool = False
    checkpoint: Path | None = None  # resumed from where it exists
    save_every_s: float = 120.0  # between writings of adapter and checkpoint
    log_every: int = 20

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise DataError("give either the steps of a training run or its seconds")
        if self.size.candidates < 2 or self.size.groups < 1 or self.size.pairs < 0:
            raise DataError(
                "a step needs at least 1 group of at least 2 candidates, and no fewer than 0 pairs"
            )


@dataclass(frozen=True, slots=True)
class TrainReport:
    adapter: Path
    sha256: str
    steps: int
    seconds: float
    tokens: int
    history: tuple[dict[str, float], ...]  # one entry a logged step
    figures: Mapping[str, Mapping[str, Figures]]  # moment -> set -> figures


def run_training(folders: Sequence[Path], out: Path, options: TrainOptions) -> TrainReport:
    """Trains on the sets in `folders` and writes the adapter to `out`, a report and a log beside it.

    Raises DataError where a set or an option is unusable, ModelError where the base is.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("a", encoding="utf-8") as log:
        return _Run(folders, out, options, log).go()


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _compute_copy(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same weights in `dtype`; the matrices that the adapter changes stay as they are, unused."""

    def cast(norm: Tensor | None) -> Tensor | None:
        return None if norm is None else norm.to(dtype)

    layers = tuple(
        replace(
            layer,
            attention_norm=layer.attention_norm.to(dtype),
            mlp_norm=layer.mlp_norm.to(dtype),
            q_norm=cast(layer.q_norm),
            k_norm=cast(layer.k_norm),
        )
        for layer in weights.layers
    )
    embedding = weights.embedding.to(dtype)
    head = embedding if weights.head is weights.embedding else weights.head.to(dtype)
    return Weights(embedding, layers, weights.final_norm.to(dtype), head)


class _Run:
    """One training run, from reading the sets to the last figures."""

    def __init__(self, folders: Sequence[Path], out: Path, options: TrainOptions, log: TextIO) -> None:
        self._began = time.monotonic()
        self._out, self._options, self._log = out, options, log
        torch.manual_seed(options.seed)
        self._device = pick_device(options.device)
        sets = [load_set(folder) for folder in find_sets(folders)]
        self._dev: list[ToolSet] = [
            each for folder in find_sets(options.dev) if (each := load_set(folder)).queries
        ]
        self._prompts = Prompts(_tokenizer(options.model))
        self._prefix = cache(self._prompts.prefix)
        self._corpus = Corpus(sets, options.factors)
        self._batches = self._step_batches()
        self._say(
            f"{len(self._corpus.tools)} tools, {self._corpus.example_count} examples; a step is "
            f"{self._batches.layout.tokens} tokens in {len(self._batches.layout.blocks)} lengths"
        )
        self._load_model()
        self._step = 0
        self._tokens = 0
        self._history: list[dict[str, float]] = []
        self._figures: dict[str, dict[str, Figures]] = {}
        self._pending: Tensor = torch.zeros(6, device=self._device)
        self._evaluation_s = 0.0
        self._spent = 0.0  # seconds of training before this process
        self._first_step = 0

    def _step_batches(self) -> StepBatches:
        options = self._options
        sampler = GroupSampler(self._corpus, options.mixture)
        return StepBatches(self._corpus, sampler, self._prompts, options.size, options.seed)

    def _load_model(self) -> None:
        options, device = self._options, self._device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape, weights = load_weights(options.model, torch.float32, device)
        if adapter_bytes(shape, options.rank) > MOST_ADAPTER_BYTES:
            raise DataError(
                f"an adapter of rank {options.rank} is larger than {MOST_ADAPTER_BYTES:,} bytes: lower it"
            )
        self._base = Base(weights, dtype)
        longest = self._batches.layout.blocks[-1].length
        self._decoder = Decoder(shape, _compute_copy(weights, dtype), longest, compiled=options.compiled)
        head = weights.head
        self._direction = head[self._prompts.positive] - head[self._prompts.negative]
        self._adapter = LoRA.create(weights, options.rank, options.alpha, options.seed)
        self._optimizer = torch.optim.AdamW(
            self._adapter.parameters(),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=device.type == "cuda",
        )
        self._base_sha256 = digest(options.model)
        self._say(f"base loaded on {device} in {self._since():.0f} s")

    def _since(self) -> float:
        return time.monotonic() - self._began

    def _say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    # The course of a run

    def go(self) -> TrainReport:
        self._trained_from = self._since()
        self._resume()
        self._positions = self._batches.layout.positions().to(self._device)
        mined = [at for at in self._options.mine_at if at > self._progress()]
        evaluated = [at for at in self._options.evaluate_at if at > self._progress() and self._dev]
        saved = time.monotonic()
        while self._progress() < 1.0:
            for batch in self._loader():
                self._train(batch)
                if self._step % self._options.log_every == 0:
                    self._report_progress()
                if time.monotonic() - saved > self._options.save_every_s:
                    self._save()
                    saved = time.monotonic()
                progress = self._progress()
                if evaluated and progress >= evaluated[0]:
                    self._evaluate(f"{evaluated.pop(0):.0%}", self._options.evaluate_queries // 3)
                if progress >= 1.0:
                    break
                if mined and progress >= mined[0]:
                    mined.pop(0)
                    self._mine()
                    break  # the loader's workers hold the old wrong answers
        self._report_progress()
        self._save()
        return self._finish()

    def _progress(self) -> float:
        """Share of the run that is done, by steps or by the clock."""
        options = self._options
        if options.steps is not None:
            return self._step / options.steps
        assert options.seconds is not None
        reserve = 3.5 * self._evaluation_s + 10 if self._evaluation_s else (45.0 if self._dev else 5.0)
        here = options.seconds - reserve - self._trained_from
        if here <= 0:
            return 1.0
        return (self._spent + self._since() - self._trained_from) / (self._spent + here)

    def _loader(self) -> Iterator[Batch]:
        """Batches from the current step on."""
        steps = self._options.steps or 1 << 40
        workers = self._options.workers
        return iter(
            DataLoader(
                self._batches,
                batch_size=None,
                sampler=range(self._step, steps),
                num_workers=workers,
                prefetch_factor=4 if workers else None,
                pin_memory=self._device.type == "cuda",
            )
        )

    def _train(self, batch: Batch) -> None:
        options = self._options
        batch = Batch(*(tensor.to(self._device, non_blocking=True) for tensor in batch))
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * schedule(
                self._progress(), options.warmup, options.last_rate
            )
        score, probability, match = self._losses(batch)
        total = score + options.probability_weight * probability + options.match_weight * match
        torch.autograd.backward(total)
        norm = torch.nn.utils.clip_grad_norm_(self._adapter.parameters(), options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._pending += torch.stack(
            [total.detach(), score.detach(), probability.detach(), match.detach(), norm, batch.filled.float()]
        )
        if self._step == self._first_step:
            self._pending.tolist()  # waits for the first step, which compiles: the clock starts after it
            self._say(f"first step after {self._since():.0f} s")
            self._trained_from = self._since()
        self._step += 1

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.cat((batch.answers.flatten(), batch.tools, batch.requests))
        states = self._decoder.hidden_states(
            batch.tokens, self._positions, self._batches.layout, self._base.merged(self._adapter), rows
        ).float()
        parts = [batch.answers.numel(), batch.tools.numel(), batch.requests.numel()]
        answers, tools, requests = torch.split(states, parts)
        logits = (answers @ self._direction).view_as(batch.score_right)
        match = matching_loss(
            functional.normalize(requests, dim=1),
            functional.normalize(tools, dim=1),
            batch.match_right,
            batch.match_wrong,
            self._options.temperature,
        )
        return (
            ranking_loss(logits, batch.score_right, batch.score_wrong),
            probability_loss(logits, batch.score_right, batch.score_wrong),
            match,
        )

    def _report_progress(self) -> None:
        """The one place that waits for the device while training."""
        count = self._step - int(self._history[-1]["step"] if self._history else self._first_step)
        if count <= 0:
            return
        total, score, probability, match, norm, filled = (self._pending / count).tolist()
        self._pending.zero_()
        self._tokens += round(filled * count)
        elapsed = self._since()
        last = self._history[-1]["seconds"] if self._history else self._trained_from
        pace = max(elapsed - last, 1e-9) / count
        done = min(self._progress(), 1.0)
        left = (elapsed - self._trained_from) * (1 - done) / max(done, 1e-9)
        self._history.append(
            {
                "step": self._step,
                "seconds": elapsed,
                "loss": total,
                "score": score,
                "match": match,
                "norm": norm,
            }
        )
        self._say(
            f"step {self._step} {done:.1%} loss {total:.3f} score {score:.3f} "
            f"prob {probability:.3f} match {match:.3f} norm {norm:.2f} "
            f"{pace * 1e3:.0f} ms {filled / pace:,.0f} tokens/s eta {left:.0f} s"
        )

    def _reader(self) -> Reader:
        with torch.no_grad():
            matrices = self._base.merged(self._adapter)
        return Reader(self._decoder, matrices, self._prompts, self._prefix)

    def _mine(self) -> None:
        began = time.monotonic()
        found = mine(self._corpus, self._reader(), self._options.seed + self._step)
        self._say(f"mined {found:,} wrong answers in {time.monotonic() - began:.1f} s")

    # What a run leaves

    def _resume(self) -> None:
        path = self._options.checkpoint
        if path is not None and path.is_file():
            state = torch.load(path, map_location=self._device, weights_only=True)
            self._adapter.restore(state["adapter"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._corpus.restore_mined(state["mined"].cpu(), state["mined_counts"].cpu())
            self._step = state["step"]
            self._spent = state["seconds"]
            self._say(f"resumed at step {self._step}")
        self._first_step = self._step

    def _save(self) -> None:
        """The adapter as it is, and the checkpoint where one is wanted."""
        metadata = {
            "base_sha256": self._base_sha256,
            "base": self._options.model.name,
            "prompt_version": VERSION,
            "steps": str(self._step),
            "seed": str(self._options.seed),
        }
        self._adapter.save(self._out, metadata)
        path = self._options.checkpoint
        if path is None:
            return
        mined, counts = self._corpus.mined_state()
        state = {
            "adapter": self._adapter.state(),
            "optimizer": self._optimizer.state_dict(),
            "mined": mined,
            "mined_counts": counts,
            "step": self._step,
            "seconds": self._spent + self._since() - self._trained_from,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def _evaluate(self, moment: str, most: int) -> None:
        began = time.monotonic()
        reader = self._reader()
        self._figures[moment] = {each.name: evaluate(reader, each, most) for each in self._dev}
        self._evaluation_s = time.monotonic() - began
        self._say(f"figures at {moment} ({self._evaluation_s:.0f} s)\n{table(self._figures[moment])}")

    def _finish(self) -> TrainReport:
        options = self._options
        if self._dev:
            self._evaluate("end", options.evaluate_queries)
        report = TrainReport(
            self._out,
            digest(self._out),
            self._step,
            self._since(),
            self._tokens,
            tuple(self._history),
            self._figures,
        )
        whole = {**asdict(report), "options": asdict(options)}
        self._out.with_suffix(".json").write_text(json.dumps(whole, indent=1, default=str) + "\n")
        self._say(f"{self._step} steps, {self._tokens:,} tokens in {report.seconds:.0f} s; wrote {self._out}")
        return report


def schedule(progress: float, warmup: float, last: float) -> float:
    """Share of the learning rate: a linear rise over `warmup`, then half a cosine down to `last`."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    turned = min((progress - warmup) / (1 - warmup), 1.0)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * turned))


def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model) if model.is_dir() else Tokenizer.from_gguf(model)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m mcp_discovery.training.train`: every option of a run on the command line."""
    parser = argparse.ArgumentParser(
        prog="mcp_discovery.training.train", description="Train the discovery adapter."
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="tool sets, or folders of them")
    parser.add_argument(
        "--dev", type=Path, nargs="*", default=[], help="sets to evaluate on, or folders of them"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="GGUF file or safetensors folder of the base"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="adapter to write; report and log go beside it"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="resumed from where it exists, and written while training"
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument(
        "--seconds", type=float, help="wall clock of the whole run, final evaluation included"
    )
    for name in ("rank", "seed", "workers", "evaluate_queries", "log_every"):
        parser.add_argument(_flag(name), type=int, default=_default(name))
    for name in (
        "alpha",
        "learning_rate",
        "weight_decay",
        "match_weight",
        "probability_weight",
        "temperature",
    ):
        parser.add_argument(_flag(name), type=float, default=_default(name))
    for name in ("groups", "candidates", "pairs"):
        parser.add_argument(_flag(name), type=int, default=getattr(BatchSize(), name))
    for name in ("mine_at", "evaluate_at"):
        parser.add_argument(_flag(name), type=float, nargs="*", default=_default(name))
    parser.add_argument("--augmentation", type=float, default=Mixture().augmentation)
    parser.add_argument(
        "--factor", action="append", default=[], metavar="SOURCE=NUMBER", help="weight of a source"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    given = parser.parse_args(arguments)
    try:
        run_training(given.data, given.out, _options(given))
    except (DataError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(name: str) -> Any:
    return next(each.default for each in fields(TrainOptions) if each.name == name)


def _options(given: argparse.Namespace) -> TrainOptions:
    factors = dict(DEFAULT_FACTORS)
    for pair in given.factor:
        source, _, number = pair.partition("=")
        try:
            factors[source] = float(number)
        except ValueError:
            raise DataError(f"--factor {pair}: write it as SOURCE=NUMBER") from None
    own = {each.name for each in fields(TrainOptions)}
    plain = {name: value for name, value in vars(given).items() if name in own}
    plain |= {
        "factors": factors,
        "size": BatchSize(given.groups, given.candidates, given.pairs),
        "mixture": Mixture(augmentation=given.augmentation),
        "dev": tuple(given.dev),
        "mine_at": tuple(given.mine_at),
        "evaluate_at": tuple(given.evaluate_at),
        "compiled": given.compile,
    }
    return TrainOptions(**plain)


if __name__ == "__main__":
    sys.exit(main())
