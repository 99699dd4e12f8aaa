"""Runs recorded cases in a process of their own: `-m tests.golden.recorded_cases FILE REPORT FAMILY...`.

The report is {case: {name of a number: how it differs}}; a name that is missing has the text "missing".
"""

import json
import sys
import traceback
from pathlib import Path

import datasets
import transformers

from tests.golden.compare import compare_case
from tests.golden.runs import Assets, Case, cases_of, run_case


def differences(case: Case, assets: Assets) -> dict[str, str]:
    try:
        differing, missing = compare_case(run_case(case, assets), case)
    except Exception:  # the other cases run all the same
        return {"error": traceback.format_exc()}
    return {**differing, **dict.fromkeys(missing, "missing")}


def main(file: str, report: str, *families: str) -> None:
    datasets.disable_caching()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    assets, cases = Assets(), cases_of(file)
    chosen = {name: case for name, case in cases.items() if case["family"] in families}
    Path(report).write_text(json.dumps({name: differences(case, assets) for name, case in chosen.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
