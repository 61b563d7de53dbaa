from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.plan_inputs import sampled
from penstock.workload.lengths import Lengths

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    return str(left.value.code)


def test_it_says_what_seventy_billion_at_a_thousand_a_second_need(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "llama70b", "--rate", "1000", "--ttft", "200ms")
    for word in ("YOU NEED", "a month", "per 1,000 tokens", "TTFT", "Smallest that fits", "Instead", "Assumed"):
        assert word in text
    assert max(map(len, text.splitlines())) < 200


def test_it_predicts_what_some_gpus_do_in_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "llama70b", "--gpu", "h200", "--gpus", "16", "--engine", "penstock", "--link", "own,pcie")
    for word in ("PREDICTED, not measured", "on 2 nodes", "TP8 PP2", "NVLink, 2 nodes by InfiniBand 400 Gb/s", "PCIe"):
        assert word in text
    asked = ("llama8b", "--gpu", "h200", "--gpus", "2", "--json")
    one, two, piped = json.loads(run(capsys, *asked))
    assert one["steps"]["batch_share"] == 0
    assert two["steps"]["batch_s"] < one["steps"]["batch_s"]
    assert piped["parallelism"] == {"tp": 1, "pp": 2, "ep": 1, "sp": 1}
    slower = json.loads(run(capsys, *asked, "--link", "pcie"))[1]
    assert slower["steps"]["batch_share"] > two["steps"]["batch_share"]


def test_the_page_shows_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("    penstock plan ")]
    assert len(commands) == 4
    for command in commands:
        rows = run(capsys, *command).split("\n\n")[1].splitlines()
        shown = "\n".join(f"    {row[2:]}".rstrip() for row in rows)
        assert f"    penstock plan {' '.join(command)}\n\n{shown}\n" in page, command


def test_it_halves_a_bill(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "llama70b", "--current", "gpu=h100,bill=500000,tp=8", "--halve", "--json")
    plan = json.loads(text)
    assert plan["bill"]["goal"] == 250_000
    assert plan["steps"][-1]["layout"]["cost_per_month"] <= 250_000
    assert plan["chosen"] == plan["steps"][-1]["layout"]
    assert "Reached" in run(capsys, "llama70b", "--current", "gpu=h100,bill=500000,tp=8", "--halve")


def test_a_budget_out_of_reach_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Not reached" in run(capsys, "llama70b", "--rate", "100", "--budget", "1k")


def test_a_bill_and_a_count_make_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama8b", "--rate", "10", "--current", "gpu=h100,count=100,bill=73000", "--halve", "--gpu", "h100")
    assert "1 $/h for one h100" in run(capsys, *arguments)


def test_it_reads_a_config_and_a_hardware_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "vocab_size": 1000,
                "hidden_size": 512,
                "intermediate_size": 1024,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        )
    )
    table = tmp_path / "gpus.toml"
    table.write_text("l4.price_per_hour = 0.01")
    assert " x l4: one replica" in run(capsys, str(config), "--rate", "1", "--hardware", str(table))
    assert "0.01" in run(capsys, "--list-hardware", "--hardware", str(table))


def test_a_trace_says_how_many_how_long_and_what_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2 + i]} for i in range(11)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    asked = json.loads(run(capsys, "llama8b", "--trace", str(trace), "--json"))["asked"]
    assert asked["rate"] == pytest.approx(11 / 5)
    assert (asked["prompt_tokens"], asked["output_tokens"]) == (1024, 10)
    assert asked["prefix_share"] == pytest.approx(10 * 512 / (11 * 1024))


def mooncake(path: Path, lengths: list[tuple[int, int]]) -> str:
    rows = [
        {"timestamp": 500 * i, "input_length": prompt, "output_length": output, "hash_ids": []}
        for i, (prompt, output) in enumerate(lengths)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_means_of_a_trace_are_those_of_all_its_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [(1000 + 7 * (i % 301), 3 + i * i % 47) for i in range(1200)]
    trace = mooncake(tmp_path / "trace.jsonl", lengths)
    asked = json.loads(run(capsys, "llama8b", "--trace", trace, "--gpu", "h100", "--json"))["asked"]
    prompts, outputs = zip(*lengths, strict=True)
    assert asked["prompt_tokens"] == pytest.approx(sum(prompts) / 1200)
    assert asked["output_tokens"] == pytest.approx(sum(outputs) / 1200)


def test_requests_of_a_trace_that_do_not_fit_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", [(1000, 10)] * 9 + [(200_000, 10)] + [(1000, 10)])
    main(["plan", "llama8b", "--trace", trace, "--json"])
    told = capsys.readouterr()
    asked = json.loads(told.out)["asked"]
    assert (asked["prompt_tokens"], asked["rate"]) == (1000, pytest.approx(10 / 5))
    assert told.err == "left out: 1 of 11 requests, longer than the model's context of 131,072\n"
    none = mooncake(tmp_path / "long.jsonl", [(200_000, 10)] * 2)
    assert "no request of" in refused("llama8b", "--trace", none)


@pytest.mark.parametrize("lengths", ["100:2000", "normal:1000:300", "lognormal:1000:1500"])
def test_the_mean_of_a_distribution_is_its_own(lengths: str) -> None:
    pairs = sampled(Lengths.parse(lengths), Lengths.parse("10"))
    assert sum(prompt for prompt, _ in pairs) / len(pairs) == pytest.approx(Lengths.parse(lengths).mean, rel=0.01)


def test_formats_that_a_gpu_does_not_have_are_not_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(run(capsys, "llama8b", "--rate", "10", "--gpu", "a100", "--json"))
    assert {each["formats"]["weights"] for each in plan["formats"]} == {"bfloat16", "int8", "int4"}
    assert {each["formats"]["kv"] for each in plan["formats"]} == {"bfloat16"}
    setups = [each["layout"]["setup"] for each in plan["alternatives"]]
    assert any(setup["gpu"] == "a100" for setup in setups)
    assert not any(setup["gpu"] == "a100" and "fp8" in setup["formats"].values() for setup in setups)
    assert " x a100: " not in run(capsys, "llama8b", "--rate", "10", "--quant", "fp8", "--gpu", "a100,h100")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "which model"),
        ("llama8b", "how many requests"),
        ("llama8 --rate 1", "did you mean the shape 'llama8b'"),
        ("llama8b --rate inf", "cannot be planned for"),
        ("llama8b --rate 1 --gpu h10", "did you mean 'h100'"),
        ("llama8b --rate 1 --gpu a100 --quant fp8", "a100: no fp8 there"),
        ("llama8b --rate 1 --gpu a100 --kv fp8", "a100: no fp8 there"),
        ("llama405b --rate 1 --ttft 1ms --quant fp8", "a100: it has no fp8"),
        ("llama8b --halve --current gpu=a100,count=4,quant=fp8", "a100 has no fp8"),
        ("llama8b --rate 1 --quant fp5", "did you mean 'fp8'"),
        ("llama8b --rate 1 --kv int4", "there are bf16, fp8"),
        ("llama8b --rate 1 --kv int8", "for CPUs .* 8 bits are fp8"),
        ("llama8b --rate 1 --prompt 200000", "context of 131,072"),
        ("llama8b --rate 1 --prompt long", "not a length in tokens"),
        ("llama8b --rate 1 --prefix-share 1", "prefix share of 1"),
        ("llama8b --rate 1 --percentile 100", "percentile of 100"),
        ("llama8b --rate 1 --tp 3", "cannot be split"),
        ("llama70b --rate 1 --tp 7 --pp 3 --gpu h100", "cannot be split"),
        ("llama8b --gpus 8", "--gpu h200 names one"),
        ("llama8b --gpu h200,h100 --gpus 8", "--gpu h200 names one"),
        ("llama8b --gpu h200 --gpus 8 --nodes 3", "8 GPUs on 3 nodes"),
        ("llama8b --gpu h200 --gpus 8 --tp 2", "takes no --tp"),
        ("llama8b --gpu h200 --gpus 8 --link nvlink", "no link 'nvlink'; there are own, pcie"),
        ("llama8b --gpu h200 --gpus 8 --network ib", "there are own, ib400, 100gbe"),
        ("llama8b --rate 1 --link own,pcie", "here it is one"),
        ("llama8b --rate 1 --nodes 2", "--nodes is of --gpus"),
        ("llama8b --rate 1 --pp 99", "99 stages"),
        ("llama8b --rate 1 --tp 3 --engine penstock", "intermediate size of 14,336.*that work: 1, 2, 4, 7"),
        ("llama8b --rate 1 --tp 2 --ep 2", "no mixture of experts"),
        ("mixtral-8x7b --rate 1 --tp 4 --ep 2", "it must be 1, or --tp 4"),
        ("llama8b --rate 1 --tp 2 --sp 2", "planned for --engine penstock"),
        ("llama8b --rate 1 --tp 3 --sp 2 --engine penstock", "3 ranks cannot be split into groups of 2"),
        ("llama8b --rate 1 --max-num-seqs 0", "max-num-seqs"),
        ("llama8b --rate 1 --spare -1", "negative"),
        ("llama8b --rate 1 --halve", "what shall be halved"),
        ("llama8b --rate 1 --current gpu=h100,count=4", "--halve, or --budget"),
        ("llama8b --rate 1 --halve --current gpu=h100", "count or bill"),
        ("llama8b --rate 1 --halve --current gpu=h100,cuont=3", "did you mean 'count'"),
        ("llama8b --rate 1 --halve --current gpu=h100,count=x", "count=x"),
        ("llama70b --halve --current gpu=h100,count=1", "do not carry a single request"),
        ("llama405b --rate 1 --ttft 1ms", "nothing keeps TTFT 1 ms"),
        ("llama8b --rate 1 --hardware missing.toml", "cannot read"),
        ("llama8b --rate 1 --trace missing.csv", "cannot read"),
    ],
)
def test_what_cannot_be_planned_is_told_why(arguments: str, said: str) -> None:
    import re

    assert re.search(said, refused(*arguments.split()))
