"""All answers of all syntaxes."""

from __future__ import annotations

from helpers.transcripts_frames import TRANSCRIPTS as FRAMES
from helpers.transcripts_json import TRANSCRIPTS as JSON
from helpers.transcripts_tags import TRANSCRIPTS as TAGS

TRANSCRIPTS = [*JSON, *TAGS, *FRAMES]
