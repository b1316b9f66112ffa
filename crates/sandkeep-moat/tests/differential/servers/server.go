// server NAME ADDRESS:PORT LOG: says how Go read each request. It speaks HTTP/2 without TLS, too.
package main

import (
	"fmt"
	"log"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

func main() {
	name, address := os.Args[1], os.Args[2]
	out, err := os.OpenFile(os.Args[3], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		log.Fatal(err)
	}
	var one sync.Mutex
	plain := strings.NewReplacer("\t", "%09", "\n", "%0a", "\r", "%0d")
	saw := func(w http.ResponseWriter, r *http.Request) {
		h := r.Header
		override := h.Get("X-HTTP-Method-Override") + h.Get("X-Original-URL") + h.Get("X-Forwarded-Host") + h.Get("X_HTTP_Method_Override")
		one.Lock()
		fmt.Fprintf(out, "SAW\t%s\t200\t%s\t%s\t%s\t%s\t%s\n", name, url.PathEscape(r.Method), url.PathEscape(r.Host),
			(&url.URL{Path: r.URL.Path}).EscapedPath(), plain.Replace(r.RequestURI), url.QueryEscape(override))
		one.Unlock()
		fmt.Fprintln(w, "seen")
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Addr: address, Handler: http.HandlerFunc(saw), Protocols: protocols,
		ReadHeaderTimeout: 2 * time.Second, IdleTimeout: 2 * time.Second,
		ErrorLog: log.New(os.NewFile(0, os.DevNull), "", 0),
	}
	log.Fatal(server.ListenAndServe())
}
