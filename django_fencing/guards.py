"""Which tables are guarded in a database, by what triggers.py has written."""

import re

from django.db.backends.base.base import BaseDatabaseWrapper

# Table, trigger, whether the database asks it. A partition has copies of its table's triggers.
_INSTALLED = {
    "postgresql": """
SELECT relname, tgname, tgenabled IN ('A',
    CASE current_setting('session_replication_role') WHEN 'replica' THEN 'R' ELSE 'O' END)
FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
WHERE NOT tgisinternal AND tgparentid = 0 AND pg_table_is_visible(tgrelid)
""",
    "sqlite": "SELECT tbl_name, name, 1 FROM sqlite_master WHERE type = 'trigger'",
    "mysql": "SELECT event_object_table, trigger_name, 1 FROM information_schema.triggers "
    "WHERE trigger_schema = DATABASE()",
}
_OURS = re.compile("_(fence|lease)_guard_[0-9a-f]{8}(_b)?$")


def installed(connection: BaseDatabaseWrapper) -> dict[str, bool]:
    """Return the tables that are guarded in a database, and whether it asks their guards."""
    if connection.vendor not in _INSTALLED:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(_INSTALLED[connection.vendor])
        found = [row for row in cursor.fetchall() if _OURS.search(row[1])]
    return {table: all(asks for one, _, asks in found if one == table) for table, _, _ in found}
