#!/usr/bin/env python
"""The command line of the example project."""

import os
import secrets
import sys
from contextlib import ExitStack

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line
from services import ServicesError, ensure_services


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    with ExitStack() as stack:
        if sys.argv[1:2] == ["demo"]:  # its servers must run before the settings are read
            os.environ["FENCING_NAMESPACE"] = f"demo-{secrets.token_hex(4)}"
            stack.enter_context(ensure_services(os.environ))
        execute_from_command_line(sys.argv)


if __name__ == "__main__":
    try:
        main()
    except (ImproperlyConfigured, ServicesError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: nothing is left running.\n")
        sys.exit(130)  # what a shell reports for Ctrl-C
