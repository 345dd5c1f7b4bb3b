"""Our copy of OpenTelemetry's names says what their package says."""

from opentelemetry.semconv import schemas
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    server_attributes,
    service_attributes,
)

from roseinfer.observe.tracing import semconv

THEIRS = {
    name: value
    for module in (error_attributes, gen_ai_attributes, server_attributes, service_attributes)
    for name, value in vars(module).items()
    if name.isupper()
}


def test_every_name_is_the_one_of_the_conventions() -> None:
    ours = {name: value for name, value in vars(semconv).items() if name.isupper()}
    assert ours.pop("PROVIDER") == "roseinfer"
    version = ours.pop("SEMCONV_VERSION")
    assert f"schemas/{version}" in {"/".join(schema.value.split("/")[-2:]) for schema in schemas.Schemas}
    assert ours == {name: THEIRS[name] for name in ours}
    assert len(ours) > 15
