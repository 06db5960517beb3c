"""``python -m benchmarks.tracking {measure,ingest,publish}``, where asv.conf.json is.

``measure`` measures the followed cases, ``ingest`` brings asv's files up to date with the records, ``publish`` builds
the site from them; each does what comes before it, but for measuring. Owns arguments and messages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from asv.config import Config
from asv.plugin_manager import plugin_manager
from asv.repo import get_repo
from asv.util import UserError

from benchmarks.engine import machine
from benchmarks.suites._suite import CASES
from benchmarks.tracking import results, site


def main() -> int:
    """Entry point. Exit codes: that of ``ridgemark compare``; 2 where there is nothing to work on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracking", description=__doc__)
    parser.add_argument("action", choices=("measure", "ingest", "publish"))
    parser.add_argument("--out", metavar="DIR", default="results", help="Results folder.")
    asked, more = parser.parse_known_args()
    if more and asked.action != "measure":
        parser.error(f"{asked.action} takes no more arguments; measure hands its own to ridgemark compare.")
    code = measure(["--out", asked.out, *more]) if asked.action == "measure" else 0
    if code > 1:
        return code
    try:
        conf = Config.load()
        conf.results_dir = asked.out
        for plugin in conf.plugins:
            plugin_manager.import_plugin(plugin)
        repo = get_repo(conf)
        for note in results.ingest(conf, repo):
            print(f"note: {note}", file=sys.stderr)
        if asked.action == "publish":
            print(f"Site: {site.publish(conf, repo)}")
    except (UserError, site.NothingToPublish) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def measure(arguments: list[str]) -> int:
    """Run ``ridgemark compare`` over the cases that are followed on this device; its exit code."""
    cases = f"{CASES}:{machine.default_device().kind}"
    command = [sys.executable, "-c", "from benchmarks.cli import main; main()", "compare", "--cases", cases]
    return subprocess.run([*command, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
