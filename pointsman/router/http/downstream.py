"""One client connection: parses requests, answers them in order, refuses what is malformed.

A request is handed on when it is complete, because its body decides where it goes and may have to be sent
twice. Requests that arrive while another is being answered wait, and with a second of them the socket.

The end of a client's stream may mean "I said all I have to say" or "I am gone": TCP does not tell. After it,
an interim `100 Continue`, which every HTTP/1.1 client has to ignore, is sent a few times. A client that is
gone answers with a reset, and its request is cancelled.

A connection has three states at once. What is being read:

    BETWEEN ──► IN_HEAD ──► IN_BODY ──► BETWEEN ──► …      and from any of them
       the parser's begin, end of head, end of message     ──► STOPPED: refused, closing, or the client's end

How the answer to the current request is written:

    NOT_BEGUN ──begin──► AS_IT_IS | CHUNKED | BODILESS ──end──► NOT_BEGUN

And what has been said to end the connection:

    OPEN ──the client has ended its side──► HALF_CLOSED ──our last answer──► LOST
    OPEN ──our last answer──► LINGERING (a client that still sends is heard out) ──► LOST
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import cast

import httptools

from pointsman.router.http.framing import (
    BODY_TOO_LARGE,
    HEAD_TOO_LARGE,
    announces_body,
    framing_problem,
    is_offer,
    malformed,
    without_offer,
)
from pointsman.router.http.heads import Known, known_head
from pointsman.router.http.inbox import Inbox, running_inbox
from pointsman.router.http.limits import Limits
from pointsman.router.http.messages import (
    CONTINUE,
    LAST_CHUNK,
    REASONS,
    Answer,
    AnswerHead,
    Headers,
    HttpRequest,
    RequestHead,
    refusal,
)
from pointsman.router.http.service import Job, Service
from pointsman.router.http.sockets import no_delay

_MAX_READY = 2  # requests that wait for their turn; behind one, the end of the client's stream is still seen
_NUM_PROBES = 3
_LINGER_S = 1.0
_CONTINUE_EXPECTED = b"100-continue"

BETWEEN, IN_HEAD, IN_BODY, STOPPED = range(4)  # reading
NOT_BEGUN, AS_IT_IS, CHUNKED, BODILESS = range(4)  # writing
OPEN, HALF_CLOSED, LINGERING, LOST = range(4)  # ending


class _RefusedError(Exception):
    """Stops the parser; the connection knows why."""


class ClientConnection(asyncio.Protocol):
    def __init__(self, service: Service, limits: Limits) -> None:
        self._service = service
        self._limits = limits
        self._max_body_bytes = limits.max_body_bytes  # a field of a Spec takes long to read
        self._transport: asyncio.Transport
        self._inbox: Inbox
        self._parser = httptools.HttpRequestParser(self)
        self._reading = BETWEEN
        self._writing = NOT_BEGUN
        self._ending = OPEN
        # Of the last request that came whole. Another like it is not screened again: keys do not change.
        self._known: Known[RequestHead] | None = None
        self._refusal: Answer | None = None
        # the request being received
        self._target = b""
        self._headers: Headers = []
        self._header_bytes = 0
        self._body: bytes | bytearray = b""
        self._incoming: HttpRequest | None = None
        self._owes_continue = False
        # those received, and the one being answered
        self._ready: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._job: Job | None = None
        self._is_advancing = False
        self._unsent: list[bytes] = []
        # the connection
        self._since = monotonic()
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._num_unsent = 0  # bytes of answers, at the last check
        self._moved_at = 0.0  # when that was last found to have changed
        self._num_probes = 0

    # --- what asyncio says ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inbox = running_inbox()
        no_delay(transport)
        self._service.opened(self)

    def data_received(self, data: bytes) -> None:
        inbox = self._inbox
        if not inbox.arrived:
            inbox.plan()
        inbox.arrived.append((self, data))

    def read(self, data: bytes) -> None:
        if self._reading == STOPPED:
            return
        is_between = self._current is None and self._reading == BETWEEN and not self._is_writing_paused
        if is_between and self._known is not None:
            body = self._known.body(data)
            if body is not None and len(body) <= self._max_body_bytes:
                self._start(HttpRequest(self._known.head, body))
                return
        was_in_head = self._reading == IN_HEAD
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if cause is not None and not isinstance(cause, _RefusedError):
                about = {"message": "cannot read a request", "exception": cause}
                asyncio.get_running_loop().call_exception_handler(about)
            self._stop(self._refusal or malformed(error))
        else:
            if self._reading == IN_HEAD:
                self._header_bytes += len(data) if was_in_head else 0
                if self._header_bytes > self._limits.max_header_bytes:
                    self._stop(HEAD_TOO_LARGE)
            elif is_between and len(self._ready) == 1 and self._reading != IN_BODY:
                head = self._ready[0].head
                if head.keep_alive and not head.is_http_10 and b"expect" not in head.special:
                    self._known = known_head(data, head)
        if self._ready or self._owes_continue:
            self._advance()

    def eof_received(self) -> bool:
        self._inbox.empty()
        self._reading = STOPPED
        self._ending = HALF_CLOSED
        if self._current is None and not self._ready:
            return False
        if not self._transport.can_write_eof():  # with TLS the end of one direction is the end of both
            return False
        self._probe()
        return True

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        if self._job is not None:
            self._job.pause()

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        if self._job is not None:
            self._job.resume()
        elif self._ready:
            self._advance()

    def connection_lost(self, error: Exception | None) -> None:
        self._inbox.empty()
        self._ending = LOST
        self._reading = STOPPED
        self._ready.clear()
        job, self._job, self._current = self._job, None, None
        if job is not None:
            job.cancel()
        self._service.closed(self)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # which is not taken up
                parser, num_read = self._parser, offer.args[0]
            method, version = parser.get_method(), parser.get_http_version()
            head = without_offer(method, self._target, version, self._headers)
            self._parser = httptools.HttpRequestParser(self)
            data = head + data[num_read:]

    # --- what the parser says ---

    def on_message_begin(self) -> None:
        if self._reading == STOPPED:
            raise _RefusedError
        self._target = b""
        self._headers = []
        self._header_bytes = 0
        self._body = b""
        self._reading = IN_HEAD
        self._since = monotonic()

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > self._limits.max_target_bytes:
            self._refuse(refusal(414, "the request target is too long", closes=True))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == IN_HEAD:
            self._headers.append((name.lower(), value))
        else:  # a trailer, which nobody needs
            self._header_bytes += len(name) + len(value)
            if self._header_bytes > self._limits.max_header_bytes:
                self._refuse(HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._reading = IN_BODY
        parser = self._parser
        version = parser.get_http_version()
        if parser.should_upgrade() and is_offer(parser.get_method(), self._headers):
            return
        head = RequestHead(
            parser.get_method(), self._target, self._headers, version == "1.0", parser.should_keep_alive()
        )
        self._incoming = HttpRequest(head, keep_alive=head.keep_alive)
        num_bytes = sum([len(name) + len(value) for name, value in self._headers])
        if num_bytes > self._limits.max_header_bytes or len(self._headers) > self._limits.max_headers:
            self._refuse(HEAD_TOO_LARGE)
        problem = framing_problem(
            head, version, self._parser.should_upgrade(), self._limits
        ) or self._service.screen(head, self)
        if problem is not None:
            self._refuse(problem if not announces_body(head) else problem._replace(closes=True))
        expectation = head.special.get(b"expect")
        if expectation is not None and not head.is_http_10:
            if expectation.lower() != _CONTINUE_EXPECTED:
                self._refuse(refusal(417, "only `Expect: 100-continue` is understood", closes=True))
            self._owes_continue = announces_body(head)
            self._continue()

    def on_body(self, part: bytes) -> None:
        self._owes_continue = False
        if not self._body:
            self._body = part
        else:  # not an object for each of many small chunks
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += part
        if len(self._body) > self._max_body_bytes:
            self._refuse(BODY_TOO_LARGE)

    def on_message_complete(self) -> None:
        request = self._incoming
        if request is None:
            return
        self._incoming = None
        self._owes_continue = False
        self._reading = BETWEEN if request.keep_alive else STOPPED
        request.body = bytes(self._body)
        self._body = b""
        self._ready.append(request)

    # --- what the service says ---

    @property
    def address(self) -> str:
        """The address of the client."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def is_head_sent(self) -> bool:
        """Whether the client has seen anything of the answer to its current request."""
        return self._writing != NOT_BEGUN

    def answer(self, answer: Answer) -> None:
        """The whole response to the current request."""
        request = self._current
        if request is None:
            return
        if answer.closes:
            request.keep_alive = False
        lines = [b"content-type: %b\r\n" % answer.content_type]
        lines += [b"%b: %b\r\n" % header for header in answer.headers]
        self.begin(answer.status, REASONS.get(answer.status, b""), b"".join(lines), len(answer.body))
        self.write(answer.body)
        self.end()

    def begin(self, status: int, reason: bytes, header_lines: bytes, length: int | None) -> None:
        """Status and headers; `length` None: known only at the end."""
        request = self._current
        assert request is not None
        is_bodiless = request.head.method == b"HEAD" or status in (204, 304)
        self._writing = BODILESS if is_bodiless else AS_IT_IS
        framing = b""
        if length is not None:
            framing = b"" if status == 204 else b"content-length: %d\r\n" % length
        elif not is_bodiless:
            if request.head.is_http_10:
                request.keep_alive = False
            else:
                self._writing = CHUNKED
                framing = b"transfer-encoding: chunked\r\n"
        if self._service.is_draining:
            request.keep_alive = False
        if not request.keep_alive:
            framing += b"connection: close\r\n"
        elif request.head.is_http_10:
            framing += b"connection: keep-alive\r\n"
        self._unsent.append(b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (status, reason, header_lines, framing))

    def pass_on(self, head: AnswerHead, own_lines: bytes, body: bytes) -> None:
        """The whole response of a replica; `own_lines` are headers of ours."""
        request = self._current
        assert request is not None
        if request.keep_alive and not request.head.is_http_10 and not self._service.is_draining:
            length = b"content-length: %d\r\n\r\n" % len(body)
            self._transport.write(b"".join((head.start, own_lines, length, body)))
            self._ended(request)
        else:
            self.begin(head.status, head.reason, head.lines + own_lines, len(body))
            self.write(body)
            self.end()

    def write(self, data: bytes) -> None:
        if self._writing == BODILESS or not data:
            return
        if self._writing == CHUNKED:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._unsent.append(data)

    @property
    def write_raw(self) -> Callable[[bytes], None] | None:
        """`write` and `flush` of whole chunks; None if the body has to go without them."""
        return self._transport.write if self._writing == CHUNKED else None

    def flush(self) -> None:
        """Send what was written: one system call, one packet, for all that came at the same time."""
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def end(self) -> None:
        """The response is complete: on to the next request."""
        request = self._current
        assert request is not None
        if self._writing == CHUNKED:
            self._unsent.append(LAST_CHUNK)
        self.flush()
        self._writing = NOT_BEGUN
        self._ended(request)

    def _ended(self, request: HttpRequest) -> None:
        self._job = self._current = None
        self._since = monotonic()
        if not request.keep_alive or (self._ending == HALF_CLOSED and not self._ready):
            self._finish()
        elif self._ready or self._owes_continue or self._is_reading_paused:
            self._advance()

    def abort(self) -> None:
        """The response cannot be completed; a closed connection is the only way to say so."""
        self._job = self._current = None
        self._reading = STOPPED
        self._transport.abort()

    def disconnect(self) -> None:
        """Break the connection; whoever works on a request learns that the client is gone."""
        self._transport.abort()

    def close_if_idle(self) -> None:
        """Between two requests a connection can be closed without harm."""
        if self._current is None and not self._ready and self._reading not in (IN_HEAD, IN_BODY):
            self._transport.close()

    def close(self) -> None:
        """Close the connection once what was written has left."""
        self._transport.close()

    def check(self, now: float) -> None:
        """Called a few times a second: everything that takes too long."""
        age_s = now - self._since
        limits = self._limits
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent != self._num_unsent:
            self._num_unsent, self._moved_at = num_unsent, now
        still_s = now - self._moved_at
        if num_unsent and still_s > limits.idle_timeout_s:
            self._transport.abort()
        elif self._ending == LINGERING:
            if not num_unsent and min(age_s, still_s) > _LINGER_S:
                self._transport.abort()
        elif self._current is not None:
            if self._ending == HALF_CLOSED:
                self._probe()
        elif self._reading in (IN_HEAD, IN_BODY):
            if age_s > limits.request_timeout_s:
                self._stop(refusal(408, "the request took too long to arrive", closes=True))
                self._advance()
        elif age_s > limits.keep_alive_s:
            self._transport.close()

    # --- within ---

    def _advance(self) -> None:
        """Start on the next request, if its turn has come and the client reads what it has asked for."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._ready and self._current is None and not self._is_writing_paused:
                self._start(self._ready.popleft())
        finally:
            self._is_advancing = False
        self._continue()
        should_pause = len(self._ready) >= _MAX_READY
        if should_pause != self._is_reading_paused and self._ending != LOST:
            self._is_reading_paused = should_pause
            if should_pause:
                self._transport.pause_reading()
            elif not self._transport.is_closing():
                self._transport.resume_reading()

    def _start(self, request: HttpRequest) -> None:
        self._current = request
        if request.refusal is not None:
            self.answer(request.refusal)
            return
        job = self._service.handle(request, self)
        if self._current is request:
            self._job = job

    def _continue(self) -> None:
        """`100 Continue` is part of the order of answers too."""
        if self._owes_continue and self._current is None and not self._ready:
            self._owes_continue = False
            self._transport.write(CONTINUE)

    def _refuse(self, answer: Answer) -> None:
        """Stop the parser, which is calling us, and remember why."""
        self._refusal = answer._replace(closes=True)
        raise _RefusedError

    def _stop(self, answer: Answer) -> None:
        """Read no more requests; answer this one in its turn."""
        if self._reading == STOPPED:  # what follows a request with `Connection: close` is of no interest
            return
        self._reading = STOPPED
        self._owes_continue = False
        request = self._incoming or HttpRequest(RequestHead(b"GET", b"*", [], False, False), keep_alive=False)
        self._incoming = None
        request.keep_alive = False
        request.refusal = answer
        self._ready.append(request)

    def _finish(self) -> None:
        """Close; but a client that is still sending would lose the answer to a reset, so hear it out."""
        self._reading = STOPPED
        self._ready.clear()
        if self._ending == HALF_CLOSED or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._ending = LINGERING
            self._transport.write_eof()

    def _probe(self) -> None:
        request = self._current
        may_probe = request is not None and not request.head.is_http_10 and not self.is_head_sent
        if may_probe and self._num_probes < _NUM_PROBES:
            self._num_probes += 1
            self._transport.write(CONTINUE)
