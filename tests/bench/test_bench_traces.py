"""The readers of the benchmark of traces, on tiny files of the published forms."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces import mean_hourly_rate, read_metric, read_users


def test_a_metric_comes_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "m.csv"
    file.write_text("timestamp_anon,value,container_ip\n20.0,7.0,x\n10.0,5.0,y\n")
    assert read_metric(file).tolist() == [[10.0, 20.0], [5.0, 7.0]]


def test_users_are_numbered_in_order_of_appearance(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    rows = ("2024-11-15 16:57:50,x,G0,0", "2024-11-15 16:57:55,x,G1,2", "2024-11-15 16:57:56,x,G0,1")
    file.write_text("\n".join(("gmt_create,predict_type,groupId,num_lora", *rows, "")))
    at, user, num_loras = read_users(file)
    assert (at - at[0]).tolist() == [0.0, 5.0, 6.0]
    assert user.tolist() == [0, 1, 0] and num_loras.tolist() == [0, 2, 1]


def test_hours_without_a_client_count(tmp_path: Path) -> None:
    file = tmp_path / "h.csv"
    file.write_text("model,client_id,hour,mean_rate_rps\na,0,1,0.5\na,2,0,0.25\na,2,1,0.25\na,0,3,1\nb,9,9,1\n")
    assert mean_hourly_rate(file, "a") == pytest.approx(2.0 / 4)
