"""Compare the host's processor time of training steps, on the ghost, with what their counts say.

    python benchmarks/host_times.py [--networks gpt resnet50 ...] [--rounds 25]

Networks are made small, so that arithmetic is nothing: as written, with an update, checkpointed by hand and
selectively, and as memfit's plans, all of them uninstrumented. Their times are predicted from the networks of
``memfit doctor --time``, which run in turns with each: the speed of a shared machine changes from second to
second. A launch takes nothing on the ghost, so neither side has the driver's time.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from measuring import at_least_1, command_line, load_ghost

HUGGING = {"hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 96}
KEPT = ("aten.addmm", "aten.mm", "aten.convolution")


def networks() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]]:
    """Return networks by name: what makes each, its loss, and the pattern of its blocks."""
    import timm
    import torch
    import transformers
    from planned_networks import Gpt
    from torch.nn.functional import cross_entropy
    from torchvision import models

    text, label = torch.zeros(2, 17, dtype=torch.long).cuda(), torch.zeros(1, dtype=torch.long).cuda()

    def classify(model: Any, size: int = 64) -> Any:
        return cross_entropy(model(torch.zeros(1, 3, size, size, device="cuda")), label)

    def predict(model: Any) -> Any:
        return cross_entropy(model(text).flatten(0, 1), text.flatten())

    def hugging(model: Any) -> Any:
        return model(input_ids=text, labels=text).loss

    bert = transformers.BertConfig(**HUGGING, vocab_size=64)
    llama = transformers.LlamaConfig(**HUGGING, vocab_size=64, num_key_value_heads=4, use_cache=False)
    return {
        "gpt": (partial(Gpt, width=48, vocabulary=64), predict, "blocks.*"),
        "resnet50": (models.resnet50, classify, "layer?.*"),
        "vit": (partial(models.VisionTransformer, 64, 16, 6, 4, 48, 96), classify, "encoder.layers.*"),
        "bert": (partial(transformers.BertForMaskedLM, bert), hugging, "bert.encoder.layer.*"),
        "llama": (partial(transformers.LlamaForCausalLM, llama), hugging, "model.layers.*"),
        "swin": (models.swin_t, classify, "features.5.?"),
        "densenet": (models.densenet121, classify, "features.denseblock?"),
        "convnext": (models.convnext_tiny, classify, "CNBlock"),
        "mixer": (partial(timm.create_model, "mixer_s32_224"), partial(classify, size=224), "blocks.*"),
        "regnet": (partial(timm.create_model, "regnetx_002"), partial(classify, size=224), "s?.*"),
    }


def rows(make: Callable[[], Any], loss: Callable[[Any], Any], pattern: str) -> Iterator[tuple[str, Any]]:
    """Yield each way to train a network, and what it runs and counts."""
    import memfit
    from memfit.run.host_work import CountedRun, ways_to_run
    from memfit.strategies.mechanisms.module_patterns import modules_named

    model = make().cuda()
    blocks = [*modules_named(model, pattern, "blocks").values()]
    ways = ways_to_run(model, partial(loss, model), blocks)
    yield from ways.items()
    for way, of, kept in (("plan", "checkpointed", ()), ("plan in part", "selective", KEPT)):
        planned, counts = make().cuda(), ways[of].counts
        memfit.apply(planned, memfit.Plan(checkpointing=memfit.Checkpointing(pattern, save_ops=kept)))
        counts = replace(counts, checkpointed_tensors=0, replayed_tensors=counts.checkpointed_tensors)
        yield way, CountedRun(counts, partial(_train, planned, loss))


def _train(model: Any, loss: Callable[[Any], Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    loss(model).backward()


def main() -> None:
    """Measure, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--networks", nargs="*", default=[])
    parser.add_argument("--rounds", type=at_least_1, default=25)
    args = parser.parse_args()
    load_ghost()
    import torch

    from memfit.records import HostTimes
    from memfit.run.host_work import least_processor_times, seconds_of_one, small_networks, ways_to_run

    torch.set_num_threads(1)
    known = networks()
    ways = [
        way for network, loss in small_networks() for way in ways_to_run(network, loss, [*network]).values()
    ]
    errors = []
    print("network       step          measured predicted  ratio   of trained: measured, predicted")
    for name in args.networks or known:
        found = dict(rows(*known[name]))
        runs = [each.run for each in (*ways, *found.values())]
        seconds = least_processor_times(runs, float("inf"), args.rounds)
        times = HostTimes(seconds_of_one([each.counts for each in ways], seconds[: len(ways)]), "")
        measured = dict(zip(found, seconds[len(ways) :], strict=True))
        predicted = {way: times.step_seconds(each.counts) for way, each in found.items()}
        for way, second in measured.items():
            guess = predicted[way]
            errors.append(abs(guess / second - 1))
            ratios = f"{second / measured['trained']:7.2f} {guess / predicted['trained']:6.2f}"
            times_of = f"{1e3 * second:6.2f} ms {1e3 * guess:6.2f} ms {guess / second:6.2f}"
            print(f"{name:13} {way:13} {times_of} {ratios}")
    errors.sort()
    median, most = statistics.median(errors), errors[int(0.9 * len(errors))]
    print(f"|error|: median {median:.1%}, 90 % of rows {most:.1%}, {len(errors)} rows")


if __name__ == "__main__":
    main()
