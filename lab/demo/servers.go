// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/routers"
)

// nginx starts an nginx that answers every request with its name. All of one host may share the address.
func (h *Host) nginx(name, listen string) (*lab.Process, string, error) {
	dir := filepath.Join(h.stage.Dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, "", err
	}
	conf := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/nginx.pid; error_log %[1]s/error.log;
events { worker_connections 1024; }
http {
	access_log off; keepalive_timeout 0;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
	server { listen %[2]s reuseport; location / { return 200 "%[3]s"; } }
}
`, dir, listen, name)
	file := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		return nil, "", err
	}
	p, err := h.Daemon(name, "nginx", "-p", dir, "-e", dir+"/error.log", "-c", file)
	if err != nil {
		return nil, "", err
	}
	// Like start-stop-daemon: the number is known before nginx has its sockets.
	pidfile := filepath.Join(h.stage.Dir, name+".pid")
	return p, pidfile, os.WriteFile(pidfile, []byte(strconv.Itoa(p.PID)+"\n"), 0o644)
}

// crowd is a number of clients, each with its own address.
type crowd struct {
	dialer  *routers.Dialer
	clients []netip.Addr
	to      netip.AddrPort
}

// answer is the answer to one client.
type answer struct {
	from string // "" without an answer
	err  error
}

// ask sends a request of each client and returns the answers.
func (c *crowd) ask(ctx context.Context) []answer {
	all := make([]answer, len(c.clients))
	done := make(chan int)
	for i := range c.clients {
		go func() {
			all[i].from, all[i].err = c.get(c.clients[i])
			done <- i
		}()
	}
	for range c.clients {
		<-done
	}
	return all
}

// get makes an HTTP request, and returns the body.
func (c *crowd) get(from netip.Addr) (string, error) {
	conn, err := c.dialer.Dial("tcp", from, c.to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return "", err
	}
	b, err := io.ReadAll(conn)
	if err != nil {
		return "", err
	}
	return body(string(b)), nil
}

func body(answer string) string {
	const end = "\r\n\r\n"
	for i := 0; i+len(end) <= len(answer); i++ {
		if answer[i:i+len(end)] == end {
			return answer[i+len(end):]
		}
	}
	return ""
}

// reachable waits until a port of the host accepts connections.
func (h *Host) reachable(ctx context.Context, addr string) error {
	return within(ctx, patience, addr+" accepts connections", func() error {
		return h.Do(func() error {
			c, err := net.DialTimeout("tcp", addr, time.Second)
			if err == nil {
				c.Close()
			}
			return err
		})
	})
}
