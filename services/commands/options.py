"""Options that several commands of `epd` share."""

from typing import Annotated

import typer

Address = Annotated[str, typer.Option(help="host:port of the gateway's gRPC [default: the running mesh's]")]
Etcd = Annotated[str, typer.Option(help="host:port of an etcd, several separated by commas", envvar="EPD_ETCD")]
Config = Annotated[str, typer.Option(help=r"TOML file with tables \[worker] and \[gateway]", envvar="EPD_CONFIG")]
Otlp = Annotated[
    str | None, typer.Option(help="where spans go, host:port of an OTLP collector", envvar="EPD_OTLP_ENDPOINT")
]
Ca = Annotated[str, typer.Option(help="file of the authority to trust, or `system`", envvar="EPD_CA")]
Certs = Annotated[str, typer.Option(help="directory with ca.pem and a certificate of our own", envvar="EPD_CERTS")]
Drain = Annotated[float | None, typer.Option(help="longest time for running requests to finish at the end")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16")]
