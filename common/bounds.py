"""Numbers that settings take. A struct of them is checked when a file or the environment is read into it."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Span = Annotated[float, msgspec.Meta(gt=0.0)]  # seconds, never none
Rate = Annotated[float, msgspec.Meta(ge=0.0)]  # a second
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
