"""docs/results.md is what the saved runs say."""

from experiments import results_page


def test_the_committed_page_is_up_to_date():
    committed = (results_page.ROOT / results_page.PAGE).read_text()
    assert committed == results_page.page(), "run python -m experiments.results_page"


def test_sections_and_what_is_missing(tmp_path):
    folder = tmp_path / "results" / "drift"
    folder.mkdir(parents=True)
    (folder / "table.md").write_text("# Drift\n\n    python -m experiments.drift\n\n## Toy head\n\n![a](a.png)\n")
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(b"")
    text = results_page.page(tmp_path)
    assert "### Toy head" in text and "# Drift" not in text
    assert (
        text.count("a.png") == 1 and "![b.png](../results/drift/b.png)" in text and "](../results/drift/a.png)" in text
    )
    assert "- Every method on the trained model (results/accuracy)" in text.split("## Not measured")[1]
