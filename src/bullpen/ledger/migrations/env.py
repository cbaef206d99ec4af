"""Runs the steps inside the transaction that `bullpen.ledger.migrate` has opened, or writes them as SQL text."""

from __future__ import annotations

from alembic import context

from bullpen.ledger.security import VERSION_TABLE

attributes = context.config.attributes
for step in context.script.walk_revisions():
    # A step whose part is not wanted, or is there already, is passed over as if it had nothing to do.
    if not attributes["steps"][step.revision]:
        setattr(step.module, "upgrade", lambda: None)  # noqa: B010 - the type checker knows no such member
connection = attributes.get("connection")
dialect = attributes["dialect"] if connection is None else connection.dialect.name
schema = attributes["schema"] if dialect == "postgresql" else None

if connection is None:
    context.configure(
        dialect_name=dialect,
        as_sql=True,
        literal_binds=True,
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        output_buffer=context.config.output_buffer,
    )
    if schema is not None:
        # Before anything else: the table of versions lies in it too.
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
else:
    if schema is not None:
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)

with context.begin_transaction():
    context.run_migrations()
