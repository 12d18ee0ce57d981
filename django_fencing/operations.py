"""ProtectFence, a migration operation: the database itself guards the fence, whatever writes."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from django.db import connections, models, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.migrations.state import ProjectState

from django_fencing import triggers
from django_fencing.models import FENCE_FIELDS, fence_model
from django_fencing.signals import key_values, logger

# Yields the statements for one table.
Written = Callable[..., Iterator[str]]


class ProtectFence(Operation):
    """
    Guard the fence of a FencedResource model by a trigger: it can never go down.

    That holds for whatever updates it: raw SQL, update(), bulk_update(), upserts, fixtures, other
    services. Where Django executes the statement the error is StaleToken. `model` is the name of a
    model of the migration's app, or "app_label.Model".

    With `require_lease` (PostgreSQL) an UPDATE or DELETE of a row is refused unless it is done in
    the fenced transaction of that row's own lease; the error is UnfencedWrite. An UPDATE that only
    moves the fence up passes, as do INSERT and TRUNCATE. Other databases guard the fence alone,
    which the log says as a warning.
    The tables of multi-table children in the same app are guarded as well; those of other apps,
    and children of later migrations, need an operation of their own.

    Before the model is renamed or deleted, or its key renamed, undo it by UnprotectFence.
    """

    reversible = True
    category = OperationCategory.ADDITION

    _does: Written = staticmethod(triggers.creating)
    _undoes: Written = staticmethod(triggers.dropping)

    def __init__(self, model: str, require_lease: bool = False) -> None:
        if not isinstance(model, str):
            raise TypeError(f"{type(self).__name__} needs the name of a model, not {model!r}.")
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
        self._execute(self._does, app_label, schema_editor, to_state)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        self._execute(self._undoes, app_label, schema_editor, to_state)

    def describe(self) -> str:
        guarded = "fence and rows" if self.require_lease else "fence"
        return f"Protect the {guarded} of {self.model}"

    @property
    def migration_name_fragment(self) -> str:
        return f"protect_{self.model.rpartition('.')[2].lower()}"

    def references_model(self, name: str, app_label: str) -> bool:
        label, _, model = self.model.rpartition(".")
        return name.lower() == model.lower() and (label or app_label) == app_label

    def statements(
        self,
        written: Written,
        app_label: str,
        connection: BaseDatabaseWrapper,
        state: ProjectState,
    ) -> Iterator[str]:
        """Yield what triggers.creating() or dropping() has `written` for each table."""
        model = self._model(app_label, state)
        by = f"{model._meta.label_lower} {self.require_lease}"
        children = [
            child
            for child in state.apps.get_models()
            if model in child._meta.get_parent_list() and not child._meta.proxy
        ]
        for each in (model, *children):
            is_here = each._meta.app_label == model._meta.app_label and not each._meta.swapped
            # An unmanaged table is guarded too.
            if is_here and router.allow_migrate_model(connection.alias, each):
                yield from written(connection, each, by, require_lease=self.require_lease)

    def _execute(
        self,
        written: Written,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        state: ProjectState,
    ) -> None:
        connection = schema_editor.connection
        guards_rows = self.require_lease and written is triggers.creating
        if guards_rows and connection.vendor != "postgresql":
            line = {"model": self.model, "database": connection.vendor}
            logger.warning("%s", key_values("require_lease_ignored", line))
        for statement in self.statements(written, app_label, connection, state):
            schema_editor.execute(statement, params=None)

    def _model(self, app_label: str, state: ProjectState) -> type[models.Model]:
        """Return the model in that state. Raise ValueError if it has no fence to be guarded."""
        label, _, name = self.model.rpartition(".")
        try:
            found: Any = state.apps.get_model(label or app_label, name)
        except LookupError as error:
            raise LookupError(
                f"{error} Where {self.model} is another app's, let the migration depend on the one "
                f"that makes it."
            ) from error
        model: type[models.Model] = found._meta.concrete_model
        fields = {field.name for field in model._meta.get_fields()}
        if not fields.issuperset(FENCE_FIELDS):
            raise ValueError(f"{model._meta.label} has no fence to protect.")
        if self.require_lease and isinstance(model._meta.pk, models.CompositePrimaryKey):
            raise ValueError(f"{model._meta.label} has a composite primary key: it has no lease.")
        if not self.require_lease and (owner := fence_model(model)) is not model:
            raise ValueError(
                f"The fence of {model._meta.label} is that of {owner._meta.label}: "
                f"protect that one."
            )
        return model


class UnprotectFence(ProtectFence):
    """Undo a ProtectFence with the same arguments, or fail if there is none."""

    category = OperationCategory.REMOVAL

    _does = staticmethod(functools.partial(triggers.dropping, strict=True))
    _undoes = staticmethod(triggers.creating)

    def describe(self) -> str:
        return f"Unprotect {self.model}"

    @property
    def migration_name_fragment(self) -> str:
        return f"un{super().migration_name_fragment}"


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
    applied.sort(key=lambda key: getattr(loader.applied_migrations[key], "pk", 0))
    protected: dict[tuple[str, str, bool], ProtectFence] = {}
    for app_label, name in applied:
        for operation in _protecting(loader.graph.nodes[app_label, name].operations):
            key = (app_label, operation.model.lower(), operation.require_lease)
            protected.pop(key, None)
            if not isinstance(operation, UnprotectFence):
                protected[key] = operation
    if not protected:
        return
    state = loader.project_state(applied)
    tables = set(connection.introspection.table_names())
    for (app_label, _, _), operation in protected.items():
        with suppress(LookupError, ValueError):  # the model is gone, or its fence
            if operation._model(app_label, state)._meta.db_table not in tables:
                continue  # the migration was faked
            with connection.cursor() as cursor:
                for statement in operation.statements(
                    triggers.creating, app_label, connection, state
                ):
                    cursor.execute(statement)


def _protecting(operations: Iterable[Operation]) -> Iterator[ProtectFence]:
    for operation in operations:
        if isinstance(operation, ProtectFence):
            yield operation
        elif isinstance(operation, SeparateDatabaseAndState):
            yield from _protecting(operation.database_operations)
