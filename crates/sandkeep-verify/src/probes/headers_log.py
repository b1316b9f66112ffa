# A program in the sandbox that notes every header it is sent.
import http.server
class Log(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open("/tmp/headers.log", "a") as file:
            file.write(self.path + "\n" + str(self.headers) + "\n")
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"noted")
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("0.0.0.0", 8000), Log)
FOUND["ready"] = 1
done()
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
server.serve_forever()
