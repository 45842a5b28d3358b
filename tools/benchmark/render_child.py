"""Kernels of one checkout as text, so that those of two checkouts can be timed in the same rounds.

Run as a program, by its path, so that it imports the cutegen of the checkout that it runs in.

    python render_child.py CHECKOUT ARCH SM_COUNT

It answers each line of its standard input, ``{"problem": ..., "config": ...}`` with an empty config for the
default, with one line of JSON: ``text``, ``config`` and what a launch takes, ``scalars`` and
``workspace_bytes``; or ``error``.
"""

from __future__ import annotations

import json
import sys

__all__ = ["main"]


def main() -> int:
    """Answer lines until there are no more."""
    root, arch_name, sm_count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, root)
    import cutegen
    from cutegen.arch import find_arch
    from cutegen.build.render import render
    from cutegen.errors import CutegenError
    from cutegen.families.registry import find_space, parse_problem, space_of
    from cutegen.search.defaults import default_config
    from cutegen.space import Config

    print(cutegen.__file__, flush=True)
    arch = find_arch(arch_name)
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            problem = parse_problem(asked["problem"])
            default = find_space(problem.family, arch)
            config = Config.parse(asked["config"]) or default_config(default, problem, sm_count)
            launch = space_of(config, problem.family, arch).launch(config, problem, sm_count)
            answer = {
                "text": render(problem, config, arch).text,
                "config": str(config),
                "scalars": list(launch.scalars),
                "workspace_bytes": launch.workspace_bytes,
            }
        except CutegenError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
