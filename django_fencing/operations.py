"""ProtectFence, a migration operation: the database itself guards the fence, whatever writes."""

from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.migrations.state import ProjectState

from django_fencing import triggers
from django_fencing.models import FENCE_FIELDS, fence_model


class ProtectFence(Operation):
    """
    Guard the fence of a FencedResource model by a trigger: it can never go down.

    That holds for whatever writes it: raw SQL, update(), bulk_update(), upserts, fixtures, other
    services. Where Django sends the statement the error is StaleToken. `model` is the name of a
    model of the migration's app, or "app_label.Model".

    With `require_lease` (PostgreSQL) an UPDATE or DELETE of a row is refused unless it is done in
    the fenced transaction of that row's own lease, the tables of multi-table children included;
    the error is UnfencedWrite. An UPDATE that only moves the fence up passes, as does an INSERT.
    Other databases guard the fence alone.

    Children that are made by a later migration need the operation too. Undo it before the table,
    or the column of its primary key, is renamed, and do it again afterwards.
    """

    reversible = True
    category = OperationCategory.ADDITION

    def __init__(self, model: str, require_lease: bool = False) -> None:
        if not isinstance(model, str):
            raise TypeError(f"ProtectFence needs the name of a model, not {model!r}.")
        self.model = model
        self.require_lease = require_lease

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change nothing: triggers are no part of a model."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        for statement in self._statements(
            triggers.creating, app_label, schema_editor.connection, to_state
        ):
            schema_editor.execute(statement, params=None)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        for statement in self._statements(
            triggers.dropping, app_label, schema_editor.connection, from_state
        ):
            schema_editor.execute(statement, params=None)

    def describe(self) -> str:
        guarded = "fence and rows" if self.require_lease else "fence"
        return f"Protect the {guarded} of {self.model}"

    @property
    def migration_name_fragment(self) -> str:
        return f"protect_{self.model.rpartition('.')[2].lower()}"

    def references_model(self, name: str, app_label: str) -> bool:
        label, _, model = self.model.rpartition(".")
        return name.lower() == model.lower() and (label or app_label) == app_label

    def _statements(
        self,
        written: Callable[..., Iterator[str]],
        app_label: str,
        connection: BaseDatabaseWrapper,
        state: ProjectState,
    ) -> Iterator[str]:
        label, _, name = self.model.rpartition(".")
        model = state.apps.get_model(label or app_label, name)._meta.concrete_model
        fields = {field.name for field in model._meta.get_fields()}
        if not fields.issuperset(FENCE_FIELDS):
            raise ValueError(f"{model._meta.label} has no fence to protect.")
        if not self.require_lease and (owner := fence_model(model)) is not model:
            raise ValueError(
                f"The fence of {model._meta.label} is that of {owner._meta.label}: "
                f"protect that one."
            )
        children = [
            child for child in state.apps.get_models() if model in child._meta.get_parent_list()
        ]
        for each in (model, *children):
            if self.allow_migrate_model(connection.alias, each):
                yield from written(connection, each, require_lease=self.require_lease)


def restore(using: str, plan: Any = (), **kwargs: Any) -> None:
    """
    Make the triggers anew that a migration has lost, after `migrate`.

    SQLite cannot alter most of a table: Django makes another one in its place, without triggers.
    """
    connection = connections[using]
    if connection.vendor != "sqlite" or not plan:
        return
    loader = MigrationLoader(connection)
    applied = [key for key in loader.applied_migrations if key in loader.graph.nodes]
    protecting = [
        (app_label, operation)
        for app_label, name in applied
        for operation in loader.graph.nodes[app_label, name].operations
        if isinstance(operation, ProtectFence)
    ]
    if not protecting:
        return
    state = loader.project_state(applied)
    with connection.cursor() as cursor:
        for app_label, operation in protecting:
            for statement in operation._statements(triggers.creating, app_label, connection, state):
                cursor.execute(statement)
