"""A run of the zoo that goes on, and its page."""

from pathlib import Path

from mlx_lm.utils import MODEL_REMAPPING

from engine.model.multimodal import FAMILIES
from tests import vision_models
from zoo.examine import ArchitectureReport
from zoo.farm import Way
from zoo.results import Results
from zoo.table import PLAIN, RANKS, image_families, page

ON_RANKS = Way(ranks=RANKS)
RIGHT = ArchitectureReport(name="llama", loads=True, batched=True, batching="ragged")


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    first = Results(tmp_path / "zoo")
    first.add(ON_RANKS, "llama", RIGHT)
    first.add(ON_RANKS, "rope_utils", None)  # no model
    again = Results(tmp_path / "zoo")
    names = ["llama", "mamba", "rope_utils"]
    assert again.missing(ON_RANKS, names) == ["mamba"]
    assert again.missing(Way(), names) == names
    assert again.reports(ON_RANKS, names) == {"llama": RIGHT}


def test_the_page_says_how_models_are_divided() -> None:
    whole = {name: ArchitectureReport(name=name, loads=True) for name in ("llama", "mamba")}
    undivided = ArchitectureReport(name="mamba")
    divided = {"llama": RIGHT, "mamba": undivided}
    wrong = ArchitectureReport(name="llama", loads=True, error="logits differ")
    by_way = {Way(): whole, Way(True): whole, ON_RANKS: divided}
    text = page(by_way)
    assert "* On 2 ranks: 1 can be divided, 1 right." in text
    assert "| llama | right | no |  |  | ragged | no |" in text
    assert "| mamba | right | no |  |  |  | no |" in text
    by_way[ON_RANKS] = divided | {"llama": wrong}
    assert "| WRONG: logits differ |" in page(by_way)
    assert "1 can be divided, 0 right." in page(by_way)


def test_models_that_take_images_are_listed_by_their_language_models() -> None:
    written = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    table, _, of_images = written.partition("## Models that take images")
    listed = table.partition("INT8:\n")[2].partition(".\n\n")[0].replace("\n", " ")
    rows = [
        f"| {name.strip('*')} | {' | '.join(PLAIN[:4])} | | yes | yes | |"
        for name in listed.split(", ")
    ]
    rows += [line for line in table.splitlines() if line.startswith("| ")]
    families = image_families(rows)
    assert families in of_images
    for kind, family in FAMILIES.items():
        name = family.text or MODEL_REMAPPING.get(kind, kind)
        assert f"{kind} ({name})" in families.replace("\n ", "")
    assert "* right, batched: yes, `ragged` (as on a GPU: `ragged`)" in families
    assert vision_models.FAMILIES.keys() == FAMILIES.keys()  # each is compared with mlx-vlm


def test_architectures_with_the_best_results_are_listed_in_one_paragraph() -> None:
    best = ArchitectureReport(
        name="llama", loads=True, batched=True, batching="ragged", prefix_cache=True, int8=True
    )
    slow = ArchitectureReport(name="mamba", loads=True, batched=True, batching="dense")
    reports = {"llama": best, "mamba": slow}
    text = page({Way(): reports, Way(True): reports, ON_RANKS: {"llama": best}})
    assert "INT8:\nllama*.\n" in text and "| llama |" not in text
    assert "| mamba | right | yes | dense |" in text
