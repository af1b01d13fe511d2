"""A gateway of your own: it carries the bytes, Pointsman decides where they go. Standard library only.

python examples/gateway.py 8080 127.0.0.1:8000 127.0.0.1:8001      # its port, then the servers
"""

import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pointsman.routing.core import Core, Request

core = Core(policy="default", replicas=sys.argv[2:])
changed = threading.Condition()  # a core belongs to one thread at a time


class Gateway(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = Request(prompt_tokens=core.prompt_length(len(body) // 4))
        with changed:
            while (replica := core.decide(request)) is None:  # held: until something has happened
                changed.wait(1.0)
            ticket = core.sent(request, replica)
        server = HTTPConnection(replica)
        server.request("POST", self.path, body, {"content-type": "application/json"})
        answer = server.getresponse()
        self.send_response(answer.status)
        self.end_headers()
        for number, event in enumerate(iter(answer.readline, b"")):
            self.wfile.write(event)
            with changed:
                if number == 0:
                    core.first_token(ticket)
                elif event != b"\n":
                    core.tokens(ticket, 1)
        with changed:
            core.finished(ticket)
            changed.notify_all()


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Gateway).serve_forever()
