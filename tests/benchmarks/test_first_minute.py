from benchmarks import first_minute


def test_three_lines_in_a_process_of_their_own_are_timed(capsys):
    assert len(first_minute.LINES.strip().splitlines()) == 3
    first_minute.main(["--samples", "40", "--threads", "1"])
    assert "40 samples: " in capsys.readouterr().out
