"""Readers of traces, on tiny files of the published forms; and what they say of wrong ones."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manylora.core.errors import ConfigError
from manylora.lab.workloads import AdapterSet, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import Extent
from manylora.lab.workloads.callers import AzureFunctions2019, AzureFunctions2021, ServeGenClients
from manylora.lab.workloads.lengths import FixedTokens, ParametricLengths
from manylora.lab.workloads.popularity import UniformShares
from manylora.lab.workloads.traces.requests import read_requests
from manylora.lab.workloads.traces.services import (
    read_adapter_order,
    read_adapter_uses,
    read_calls_per_minute,
    read_client_windows,
    read_single_calls,
    read_stack_distances,
)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n"
)
MINUTES = "HashFunction,HashApp,HashOwner,minute_1,minute_2,minute_3\nf,f,f,0,40,0\ng,g,g,3,0,1\n"
ORIGINAL = "HashOwner,HashApp,HashFunction,Trigger,480,481\no,a,f,http,5,0\no,a,g,timer,1,1\n"
CALLS = "app,func,end_timestamp,duration\na,f,5.0,1.0\na,g,3.5,3.0\nb,f,9.0,0.5\n"
WINDOWS = (
    "category,model,client_id,timestamp,rate,cv,pattern,arg1,arg2\n"
    "language,m-large,0,87000,2.0,2.0,Gamma,0.25,2.0\n"
    "language,m-large,7,87600,6.0,1.0,Weibull,1.0,0.1667\n"
    "language,m-small,0,87000,1.0,1.0,Gamma,1.0,1.0\n"
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        file = tmp_path / name
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return file

    return write_file


Write = Callable[[str, str], Path]


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure_requests_come_in_order_from_zero(write: Write, name: str) -> None:
    trace = read_requests(write(name, AZURE))
    assert trace.arrival_s is not None and trace.arrival_s.tolist() == pytest.approx([0.0, 0.052], abs=1e-6)
    assert trace.prompt.tolist() == [4808, 3180] and trace.output.tolist() == [10, 8]


def test_the_mark_that_spreadsheets_put_before_a_table_is_no_part_of_it(write: Write) -> None:
    assert read_requests(write("a.csv", "\ufeff" + AZURE)).prompt.tolist() == [4808, 3180]
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
    assert read_requests(write("m.jsonl", "\ufeff" + line)).prefix == ((0,),)
    assert read_calls_per_minute(write("f.csv", "\ufeff" + MINUTES)).shape == (2, 3)


def test_times_with_a_zone_are_read_in_it(write: Write) -> None:
    rows = "2024-05-10 00:00:00+00:00,1,1\n2024-05-10 00:00:00.250000+00:00,2,1\n2024-05-10T02:00:01.5+02:00,3,1\n"
    trace = read_requests(write("zones.csv", AZURE.partition("\n")[0] + "\n" + rows))
    assert trace.arrival_s is not None and trace.arrival_s.tolist() == pytest.approx([0.0, 0.25, 1.5], abs=1e-6)
    assert trace.prompt.tolist() == [1, 2, 3]


def test_counts_per_minute_of_both_layouts(write: Write) -> None:
    assert read_calls_per_minute(write("a.csv.gz", MINUTES)).tolist() == [[0, 40, 0], [3, 0, 1]]
    assert read_calls_per_minute(write("b.csv", ORIGINAL)).tolist() == [[5, 0], [1, 1]]


def test_single_calls_arrive_before_they_end(write: Write) -> None:
    calls = read_single_calls(write("calls.csv", CALLS))
    assert calls.arrival_s.tolist() == pytest.approx([0.0, 3.5, 8.0])
    assert calls.function.tolist() == [0, 1, 2]  # functions of one name in two applications are two


def test_uses_of_adapters(write: Write) -> None:
    uses = read_adapter_uses(write("p.csv", "adapter_id,uses_all_68195_rows\nL0,9\nL1,4\n"))
    assert uses.tolist() == [9, 4]


def test_clients(write: Write) -> None:
    windows = read_client_windows(write("w.csv", WINDOWS))
    assert [one.pattern for one in windows] == ["gamma", "weibull", "gamma"]


# -- arrivals of those who call ----------------------------------------------------------------------------------------


def test_functions_call_in_their_minutes(write: Write) -> None:
    file = write("a.csv", MINUTES)
    arrived = AzureFunctions2019(file=file).arrive(Extent(), np.random.default_rng(0))
    assert arrived.callers is not None and len(arrived.times) == 44 and arrived.num_callers == 2
    assert Counter(
        (int(time // 60), caller) for time, caller in zip(arrived.times, arrived.callers.tolist(), strict=True)
    ) == {
        (0, 1): 3,
        (1, 0): 40,
        (2, 1): 1,
    }
    faster = AzureFunctions2019(file=file, minute_s=6.0).arrive(Extent(), np.random.default_rng(0))
    assert np.allclose(faster.times * 10, arrived.times)
    counts = [
        len(AzureFunctions2019(file=file, rate=0.5).arrive(Extent(), np.random.default_rng(seed)).times)
        for seed in range(300)
    ]
    assert float(np.mean(counts)) == pytest.approx(90, abs=2.5)  # half a request per second for three minutes


def test_single_calls_stretch_to_a_rate(write: Write) -> None:
    arrived = AzureFunctions2021(file=write("calls.csv", CALLS), rate=4.0).arrive(Extent(), np.random.default_rng(0))
    assert arrived.times.tolist() == pytest.approx([0.0, 3.5 / 16, 0.5])


def test_clients_keep_their_shares_at_any_rate(write: Write) -> None:
    file = write("w.csv", WINDOWS)
    process = ServeGenClients(file=file, model="m-large", rate=2.0)
    runs = [process.arrive(Extent(), np.random.default_rng(seed)) for seed in range(40)]
    by_caller = Counter(caller for one in runs if one.callers is not None for caller in one.callers.tolist())
    total = sum(by_caller.values())
    assert total / 40 == pytest.approx(2.0 * 1200, rel=0.03)
    assert by_caller[1] / total == pytest.approx(0.75, abs=0.02)
    with pytest.raises(ConfigError, match="no client of model 'm-larg', expected one of m-large, m-small"):
        ServeGenClients(file=file, model="m-larg").arrive(Extent(), np.random.default_rng(0))


def test_callers_are_dealt_out_to_adapters(write: Write) -> None:
    lengths = ParametricLengths(prompt=FixedTokens(tokens=5), output=FixedTokens(tokens=5))
    spec = WorkloadSpec(
        arrivals=AzureFunctions2021(file=write("calls.csv", CALLS)), lengths=lengths, adapters=AdapterSet(count=2)
    )
    assert [one.adapter for one in make_workload(spec, 0).requests] == ["adapter-0", "adapter-1", "adapter-0"]
    with pytest.raises(ConfigError, match="popularity 'uniform' with arrivals 'azure-functions-2021'"):
        make_workload(
            WorkloadSpec(arrivals=spec.arrivals, lengths=lengths, popularity=UniformShares()),
            0,
        )


# -- files that are wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_requests, "", "the file is empty"),
        (read_requests, "a,b\n1,2\n", "expected a trace with one of ContextTokens"),
        (
            read_requests,
            AZURE.replace("3180", "many"),
            r"line 2, column 'ContextTokens': got 'many', expected a number",
        ),
        (read_requests, AZURE.replace("3180", "-3"), r"line 2, column 'ContextTokens': got '-3'"),
        (read_requests, AZURE.replace("3180", "1e30"), r"line 2, column 'ContextTokens': got '1e30', expected at most"),
        (read_requests, AZURE.replace(",8\n", ',"8\n' + 200_000 * "x"), "line 3: field larger than"),
        (read_requests, AZURE.replace(":04", ":04.1"), r"line 2, column 'TIMESTAMP'"),
        (read_requests, AZURE.replace("2023-11-16 18:17:03", "yesterday"), r"line 3, column 'TIMESTAMP'"),
        (read_requests, AZURE.replace(",8\n", "\n"), "line 2: got 2 columns, expected 3"),
        (read_requests, AZURE.replace("GeneratedTokens", "Tokens"), "line 1: no column 'GeneratedTokens'"),
        (read_requests, AZURE.partition("\n")[0] + "\n", "at least one request"),
        (read_requests, '{"input_length": 5}\n', "line 1, column 'timestamp': got None"),
        (read_requests, '{"input_length": 5\n', "line 1: expected a JSON object"),
        (read_requests, '{"input_length": ' + 5000 * "1" + "}\n", "line 1: expected a JSON object"),
        (read_requests, '{"input_length": ' + 99_999 * "[" + "\n", "line 1: expected a JSON object"),
        (
            read_requests,
            '{"timestamp": 1' + 400 * "0" + ', "input_length": 1}\n',
            "line 1, column 'timestamp': got 1",
        ),
        (
            read_requests,
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n',
            "column 'hash_ids'",
        ),
        (
            read_requests,
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [7, -1]}\n',
            "column 'hash_ids': got \\[7, -1\\], expected a list of whole numbers from 0",
        ),
        (read_requests, '{"timestamp": 0, "input_length": true}\n', "column 'input_length': got True"),
        (read_requests, AZURE.replace("3180", 99_999 * "z"), "got 'z{5,60}\\.\\.\\.z{5,60}', expected a number$"),
        (
            read_requests,
            AZURE.replace("Tokens\n", "Tokens,ContextTokens\n"),
            "line 1: got column 'ContextTokens' twice",
        ),
        (read_calls_per_minute, MINUTES.replace("minute_3", "minute_2"), "line 1: got column 'minute_2' twice"),
        (read_calls_per_minute, "HashFunction,1," + 200_000 * "x" + "\nf,1,1\n", "line 1: field larger than"),
        (read_calls_per_minute, "HashFunction,x\nf,1\n", "a column per minute"),
        (read_calls_per_minute, MINUTES.replace("40", "0").replace("3,0,1", "0,0,0"), "at least one call"),
        (read_calls_per_minute, MINUTES.replace("40", "4.5"), "line 2, column 'minute_2'"),
        (read_single_calls, CALLS.replace("3.0", "-3"), "line 3, column 'duration'"),
        (read_adapter_order, "lora_args\n[]\n", "at least one use"),
        (read_adapter_order, "lora_args\n[3]\n", "line 2, column 'lora_args'"),
        (read_adapter_order, "lora_args\n" + 99_999 * "-" + "1\n", "line 2, column 'lora_args'"),
        (read_stack_distances, "slots,lru_hit_all\n1,0.5\n1,0.6\n", "line 3, column 'slots'"),
        (read_stack_distances, "slots,lru_hit_all\n1,1.5\n", "line 2, column 'lru_hit_all'"),
        (read_client_windows, WINDOWS.replace("Weibull", "Pareto"), "line 3, column 'pattern'"),
    ],
)
def test_a_wrong_trace_says_where(write: Write, read: Callable[[Path], object], text: str, message: str) -> None:
    file = write("wrong.csv", text)
    with pytest.raises(ConfigError, match=message) as caught:
        read(file)
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv: the trace cannot be read: No such file"):
        read_requests(tmp_path / "nothing.csv")
    file = write("broken.csv.gz", AZURE)
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(ConfigError, match=r"broken\.csv\.gz: the trace cannot be read"):
        read_requests(file)
