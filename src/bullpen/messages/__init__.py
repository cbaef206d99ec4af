"""Messages at nine in the morning where the recipient lives. Needs the extra `postgres` or `sqlite`."""

from bullpen.errors import MessageNotSent, MissingValue
from bullpen.ledger.message_records import MessageRow, MessageStatus
from bullpen.messages.calendar import Occurrence, QuietHours, Rule, TimePolicy
from bullpen.messages.doubts import Doubt, Doubts
from bullpen.messages.enqueuer import MessageEnqueuer, Scheduler, SchedulerHealth, SchedulerOptions
from bullpen.messages.imports import ImportArguments, Imported, LineProblem, import_csv, read_csv
from bullpen.messages.messages import Messages, MessageSender
from bullpen.messages.occasions import Late, OccasionKind, Occasions
from bullpen.messages.planner import Planner
from bullpen.messages.recipients import Occasion, Recipient, Recipients
from bullpen.messages.routes import ChannelRoute, FunctionChannel
from bullpen.messages.sender import Sender, SenderOptions
from bullpen.messages.templates import Text
from bullpen.ports.channel import Accepted, Message, NotTried, Refused, Unavailable, Unknown

__all__ = [
    "Accepted",
    "ChannelRoute",
    "Doubt",
    "Doubts",
    "FunctionChannel",
    "ImportArguments",
    "Imported",
    "Late",
    "LineProblem",
    "Message",
    "MessageEnqueuer",
    "MessageNotSent",
    "MessageRow",
    "MessageSender",
    "MessageStatus",
    "Messages",
    "MissingValue",
    "NotTried",
    "Occasion",
    "OccasionKind",
    "Occasions",
    "Occurrence",
    "Planner",
    "QuietHours",
    "Recipient",
    "Recipients",
    "Refused",
    "Rule",
    "Scheduler",
    "SchedulerHealth",
    "SchedulerOptions",
    "Sender",
    "SenderOptions",
    "Text",
    "TimePolicy",
    "Unavailable",
    "Unknown",
    "import_csv",
    "read_csv",
]
