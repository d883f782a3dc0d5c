"""The docs' tables are what docs/results gives, and the script that writes them says so where they are not."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = str(ROOT / "scripts")
HEAD = {
    "command": "python bench.py",
    "commit": "abc1234",
    "date": "2026-01-31T12:00:00+00:00",
    "platform": "cpu (executed)",
    "device": "2 cores",
}


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, SCRIPTS)
    yield importlib.import_module("tables")
    sys.path.remove(SCRIPTS)


@pytest.fixture
def docs(tmp_path):
    """A page with one table of two results, not written yet."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text("# A page\n\n<!-- table: run_* -->\n<!-- end -->\n\nText.\n")
    store(tmp_path / "docs", "run_a", [{"ms": 12.5, "count": 3}], command="python bench.py --seed 0")
    store(tmp_path / "docs", "run_b", [{"ms": 1250.0, "why": "a | b"}], command="python bench.py --seed 1 --fast")
    return tmp_path / "docs"


def store(docs: Path, name: str, rows: list, **head: str) -> None:
    (docs / "results" / f"{name}.json").write_text(json.dumps({"head": HEAD | head, "rows": rows}))


WRITTEN = """# A page

<!-- table: run_* -->
```text
command  python bench.py …
commit   abc1234, 2026-01-31
device   cpu (executed), 2 cores
```

| command | ms | count | why |
| --- | ---: | ---: | --- |
| `--seed 0` | 12 | 3 |  |
| `--seed 1 --fast` | 1,250 |  | a \\| b |
<!-- end -->

Text.
"""


def test_every_page_of_the_docs_holds_what_the_results_give(tables):
    assert tables.find_faults(ROOT / "docs") == []
    pages = (ROOT / "docs" / name for name in ("evidence.md", "performance.md"))
    assert all(page.read_text().count("<!-- table: ") > 5 for page in pages)


def test_a_figure_that_is_changed_in_a_page_of_the_docs_is_found(tables, tmp_path, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "evidence.md"
    begin = "| `-m recipes.demo_cpu --seed 0` | 5f1b1c5 |"
    rows = [line for line in page.read_text().splitlines() if line.startswith(begin)]
    assert len(rows) == 1 and "0.987" in rows[0]
    page.write_text(page.read_text().replace(rows[0], rows[0].replace("0.987", "0.997")))
    assert tables.main(["--check", "--docs", str(tmp_path / "docs")]) == 1
    told = capsys.readouterr().out
    assert f"{page}: not what docs/results gives; run scripts/tables.py" in told
    assert f"-{rows[0].replace('0.987', '0.997')}" in told and f"+{rows[0]}" in told
    assert tables.main(["--docs", str(tmp_path / "docs")]) == 0
    assert page.read_text() == (ROOT / "docs" / "evidence.md").read_text()


def test_a_table_is_headed_by_what_its_results_share(tables, docs):
    assert tables.main(["--docs", str(docs)]) == 0
    assert (docs / "page.md").read_text() == WRITTEN
    assert tables.main(["--check", "--docs", str(docs)]) == 0
    store(docs, "run_b", [{"ms": 1250.0}], commit="def5678+", date="2026-02-01", note="beside a demo")
    tables.main(["--docs", str(docs)])
    text = (docs / "page.md").read_text()
    assert "device   cpu (executed), 2 cores\n" in text and "commit  " not in text and "date  " not in text
    assert "| command | commit | date | ms | count | note |" in text
    assert "|  | def5678+ | 2026-02-01 | 1,250 |  | beside a demo |" in text


def change(docs: Path, name: str, old: str, new: str) -> None:
    text = (docs / name).read_text()
    assert text.count(old) == 1
    (docs / name).write_text(text.replace(old, new))


FAULTS = {
    "another figure": (
        lambda docs: change(docs, "page.md", "| 12 |", "| 13 |"),
        "page.md: not what docs/results gives",
    ),
    "another result": (lambda docs: change(docs, "results/run_a.json", "12.5", "14.5"), "page.md: not what"),
    "another head": (lambda docs: store(docs, "run_b", [{"ms": 1.0}], device="4 cores"), "page.md: not what"),
    "no result": (lambda docs: change(docs, "page.md", "run_*", "run_a run_c"), "has no docs/results/run_c.json"),
    "no page": (lambda docs: store(docs, "other", [{"ms": 1}]), "no page shows other; give it a table"),
    "no end": (lambda docs: change(docs, "page.md", "<!-- end -->", ""), "1 tables begin and 0 end"),
    "no begin": (lambda docs: change(docs, "page.md", "Text.", "<!-- end -->"), "1 tables begin and 2 end"),
    "no date": (lambda docs: store(docs, "run_a", [{"ms": 1}], date="", device=""), "its head lacks date, device"),
    "tiny": (lambda docs: store(docs, "run_a", [{"ms": 1}], command="x --tiny"), "measured with --tiny"),
    "no rows": (lambda docs: store(docs, "run_a", []), "run_a.json: it has no rows"),
    "a list": (lambda docs: (docs / "results" / "run_a.json").write_text("[]"), "expected an object, got a list"),
    "cut short": (lambda docs: (docs / "results" / "run_a.json").write_text("{"), "run_a.json: cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_said(tables, docs, fault, capsys):
    tables.main(["--docs", str(docs)])
    plant, told = FAULTS[fault]
    plant(docs)
    before = (docs / "page.md").read_text()
    assert tables.main(["--check", "--docs", str(docs)]) == 1
    assert told in capsys.readouterr().out
    assert (docs / "page.md").read_text() == before, "a check writes nothing"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5318, 1.0, 0.0109, None], ["0.532", "1.000", "0.011", ""]),
        ([1.0036, 2.5], ["1.00", "2.50"]),
        ([99.95, 5.04], ["100.0", "5.0"]),
        ([4022.4, 94.3, 0.0], ["4,022", "94", "0"]),
        ([7.2258e-7, 2.2e-4, 0.0], ["7.2e-7", "2.2e-4", "0"]),
        ([-3.1e-12, 12_345], ["-3.1e-12", "12,345"]),
        ([{"logits": 3e-6, "missing": 0}, "x"], ["logits 3.0e-6; missing 0", "x"]),
    ],
)
def test_numbers_of_a_column_have_the_places_of_its_largest(tables, values, expected):
    assert tables.format_column(values) == expected


# A run that is killed after step 2 and resumed from step 1: each program's clock begins anew.
LINES = [
    {"step": 0, "heldout": 0.25, "time_wall": 30.0},
    {"step": 1, "time_step": 4.0, "logprob_diff_mean": 3e-7, "logprob_diff_max": 5e-5, "time_wall": 34.0},
    {"step": 2, "time_step": 2.0, "logprob_diff_mean": 6e-7, "logprob_diff_max": 2e-5, "time_wall": 22.0},
    {"step": 3, "time_step": 3.0, "heldout": 0.5, "time_wall": 25.0},
    {"step": 4, "time_step": 3.5, "heldout": 0.75, "time_wall": 30.0},
]


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    starts = [HEAD | {"versions": {"torch": "1"}, "step": step} for step in (0, 1)]
    starts[1] |= {"commit": "def5678", "versions": {"torch": "2"}}
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    return folder


def test_a_run_folder_becomes_a_row(tables, docs, run_folder, capsys):
    options = ["--name", "run_a", "--at", "3", "--note", "resumed once"]
    assert tables.main(["--docs", str(docs), "add", str(run_folder), *options]) == 0
    stored = json.loads((docs / "results" / "run_a.json").read_text())
    versions = {"torch": "2"}
    assert stored["head"] == HEAD | {"commit": "abc1234, def5678", "versions": versions, "note": "resumed once"}
    assert stored["rows"] == [
        {
            "held-out reward before": 0.25,
            "after 3": 0.5,
            "at the end": 0.75,
            "steps": 4,
            "logprob difference: mean": 6e-7,
            "logprob difference: largest": 5e-5,
            "seconds a step": 3.25,
            "seconds": 64.0,
        }
    ]


def test_a_run_that_does_not_say_where_it_comes_from_is_told_so(tables, docs, run_folder, tmp_path):
    (run_folder / "starts.jsonl").unlink()
    before = (docs / "results" / "run_a.json").read_text()
    add = ["--docs", str(docs), "add", str(run_folder), "--name", "run_a"]
    with pytest.raises(SystemExit, match=r"run: its head lacks command, commit, date, platform, device; give add"):
        tables.main(add)
    with pytest.raises(SystemExit, match=r"no held-out reward after step 2; --at takes any of \[0, 3, 4\]"):
        tables.main([*add, "--at", "2"])
    with pytest.raises(SystemExit, match=r"not a run folder: it has no metrics.jsonl"):
        tables.main(["--docs", str(docs), "add", str(tmp_path), "--name", "run_a"])
    assert (docs / "results" / "run_a.json").read_text() == before
    (run_folder / "metrics.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    with pytest.raises(SystemExit, match=r"run: the run took no step"):
        tables.main(add)
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert tables.main([*add, *(option for field in HEAD for option in (f"--{field}", HEAD[field]))]) == 0


def test_costs_of_the_suite_become_a_row_for_each_folder(tables, docs, tmp_path):
    def cost(cpu_s: float, **kinds: int) -> dict:
        return {"vllm": 0, "rank": 0, "torch": 0, "unwatched": 0} | kinds | {"cpu_s": cpu_s}

    files = {
        "collection": cost(2.0),
        "tests/engines/vllm/test_a.py": cost(3.0, vllm=1, torch=1),
        "tests/engines/test_b.py": cost(4.0, rank=2),
        "tests/test_house.py": cost(0.5),
    }
    (tmp_path / "costs.json").write_text(json.dumps({"head": HEAD, "files": files, "tests": {}}))
    tables.main(["--docs", str(docs), "add", str(tmp_path / "costs.json"), "--name", "run_a"])
    rows = json.loads((docs / "results" / "run_a.json").read_text())["rows"]
    assert [(row["tests"], row["CPU-seconds"], row["vLLM processes"], row["ranks"]) for row in rows] == [
        ("collection", 2.0, 0, 0),
        ("tests/engines", 7.0, 1, 2),
        ("tests", 0.5, 0, 0),
        ("all", 9.5, 1, 2),
    ]


def test_families_are_shown_where_they_were_measured_and_as_the_capability_tables_say(tables, docs):
    """On a CPU as far as the results go; elsewhere by the kernels under the family's rules. A refusal stays one."""
    from engines.models.families import list_families

    rows = [{"family": "gemma3", "part": "bshd"}, {"family": "llama", "part": "rollout"}]
    rows.append({"family": "qwen3_vl", "part": "thd of videos"})
    (docs / "families.json").write_text(json.dumps({"head": HEAD, "rows": [], "families": rows}))
    options = ["--name", "run_f", "--families", "--platform", "cpu (executed)"]
    assert tables.main(["--docs", str(docs), "add", str(docs / "families.json"), *options]) == 0
    (docs / "models.md").write_text("<!-- table: families of run_f -->\n<!-- end -->\n")
    assert tables.main(["--docs", str(docs)]) == 0
    lines = [line.strip("| ").split(" | ") for line in (docs / "models.md").read_text().splitlines() if "|" in line]
    titles, _, *table = lines
    shown = {line[0]: dict(zip(titles, line)) for line in table}
    assert list(shown) == list_families()
    gemma, llama, video = shown["gemma3"], shown["llama"], shown["qwen3_vl"]  # the row of videos is the last of two
    assert (gemma["sees"], gemma["rules"], llama["sees"], llama["rules"]) == (
        "images",
        "causal, window, images",
        "text",
        "causal",
    )
    parts = ("bshd", "thd", "rollout")
    assert [gemma[f"cpu: {part}"] for part in parts] == ["executed", "untested", "untested"]
    assert [llama[f"cpu: {part}"] for part in parts] == ["untested", "untested", "executed"]
    assert video["sees"] == "videos" and [line[1] for line in table if line[0] == "qwen3_vl"] == ["images", "videos"]
    assert [video[f"cpu: {part}"] for part in parts] == ["untested", "executed", "untested"]
    assert [video[f"cuda: {part}"] for part in parts] == ["untested"] * 3
    assert [gemma[f"cuda: {part}"] for part in parts] == ["emulated", "emulated", "untested"]
    assert [gemma[f"npu: {part}"] for part in parts] == ["emulated", "refused", "refused"]
    assert [llama[f"npu: {part}"] for part in parts] == ["emulated", "emulated", "untested"]
