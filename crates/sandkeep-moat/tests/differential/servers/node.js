// node.js NAME ADDRESS PORT LOG slack|strict: says how Node read each request.
const fs = require("fs");
const http = require("http");

const [name, address, port, log, mode] = process.argv.slice(2);
const out = fs.openSync(log, "a");
const plain = (text) => String(text ?? "").replace(/[\t\n\r]/g, " ");
const options = { insecureHTTPParser: mode === "slack", requireHostHeader: mode !== "slack" };

function saw(request) {
  const h = request.headers;
  const override = [h["x-http-method-override"], h["x-original-url"], h["x-forwarded-host"], h["x_http_method_override"]].join("");
  fs.writeSync(out, ["SAW", name, 200, request.method, plain(h.host), plain(request.url), plain(request.url), plain(override)].join("\t") + "\n");
}

const server = http.createServer(options, (request, response) => {
  saw(request);
  request.resume();
  response.end("seen\n");
});
server.on("upgrade", (request, socket) => {
  saw(request);
  socket.end("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
});
server.on("connect", (request, socket) => {
  saw(request);
  socket.end();
});
server.keepAliveTimeout = 2000;
server.headersTimeout = 2000;
server.listen(Number(port), address);
