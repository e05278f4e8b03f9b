// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// Servers with busy clients: they keep their connections and always send another request. A server closing
// a connection without an announcement in an answer (Connection: close) may meet a request in transit, and
// this request fails. Each server is therefore configured to announce it: GENERATIONS.md has the table.

// keepPorts are the ports of these servers.
var keepPorts = map[string]string{"keep-nginx": "8081", "keep-haproxy": "8082", "keep-caddy": "8083"}

// nginx announces it in the last answer of a connection of this age, before the deadline.
func writeKeepNginx(dir string) ([]string, error) {
	conf := fmt.Sprintf(`daemon off; pid %[1]s/pid; error_log %[1]s/error.log; worker_processes 1;
events { worker_connections 256; }
http {
	access_log off;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
	keepalive_requests 1000000; keepalive_time 500ms;
	server { listen 8081; location / { return 200 "weir\n"; } }
}
`, dir)
	file := dir + "/nginx.conf"
	return []string{"nginx", "-p", dir, "-e", dir + "/error.log", "-c", file}, os.WriteFile(file, []byte(conf), 0o644)
}

// HAProxy announces it in the next answer after SIGUSR1.
func writeKeepHAProxy(dir string) ([]string, error) {
	const conf = `global
	nbthread 1
	maxconn 256
	hard-stop-after 10s
defaults
	mode http
	option idle-close-on-response
	timeout connect 5s
	timeout client 10s
	timeout server 10s
frontend www
	bind 0.0.0.0:8082
	http-request return status 200 content-type text/plain string weir
`
	file := filepath.Join(dir, "haproxy.cfg")
	return []string{"haproxy", "-f", file}, os.WriteFile(file, []byte(conf), 0o644)
}

// Caddy announces it while it delays its end.
func writeKeepCaddy(dir string) ([]string, error) {
	conf := fmt.Sprintf(`{
	admin off
	auto_https off
	storage file_system %[1]s
	log {
		output file %[1]s/log
		level WARN
	}
	shutdown_delay 500ms
	grace_period 5s
}
http://:8083 {
	@stopping vars {http.shutting_down} true
	header @stopping Connection close
	respond "weir"
}
`, dir)
	file := dir + "/Caddyfile"
	return []string{"env", "HOME=" + dir, "GODEBUG=multipathtcp=0", "GOMAXPROCS=1", "caddy", "run", "--config", file, "--adapter", "caddyfile"}, os.WriteFile(file, []byte(conf), 0o644)
}

// keepClients hold connections and send requests on them again and again. They never retry.
type keepClients struct{ crowd }

// keepPause is the pause between an answer and the next request of a connection.
const keepPause = 6 * time.Millisecond

func startKeep(ctx context.Context, h *host) *keepClients {
	c := &keepClients{crowd{stop: make(chan struct{})}}
	for name, port := range keepPorts {
		for range 4 {
			c.wg.Go(func() {
				for !c.stopped() && ctx.Err() == nil {
					if err := c.connection(h, port); err != nil {
						c.fails(name, err)
						time.Sleep(keepPause)
					}
				}
			})
		}
	}
	return c
}

// connection sends requests until the server ends it in order: by an announcement in its last answer, or by
// a close without a request in transit.
func (c *keepClients) connection(h *host, port string) error {
	var conn net.Conn
	err := h.client.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", net.JoinHostPort(h.addr, port), requestLimit)
		return err
	})
	if err != nil {
		c.asked.Add(1)
		return err
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	for !c.stopped() {
		// Any client detects an end before its request.
		conn.SetReadDeadline(time.Now().Add(20 * time.Microsecond))
		if _, err := r.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		c.asked.Add(1)
		conn.SetDeadline(time.Now().Add(requestLimit))
		if _, err := conn.Write([]byte("GET / HTTP/1.1\r\nHost: weir.test\r\n\r\n")); err != nil {
			return err
		}
		answer, err := http.ReadResponse(r, nil)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, answer.Body); err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		if answer.Close {
			return nil
		}
		time.Sleep(keepPause)
	}
	return nil
}
