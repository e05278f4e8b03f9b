// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// crowd is a number of clients. They run until stopped.
type crowd struct {
	wg     sync.WaitGroup
	stop   chan struct{}
	asked  atomic.Int64
	failed atomic.Int64
	mu     sync.Mutex
	first  []string
}

// fails counts a failure, and keeps the reason of the first few.
func (c *crowd) fails(what string, err error) {
	c.failed.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.first) < 2 {
		c.first = append(c.first, fmt.Sprintf("%s: %v", what, err))
	}
}

func (c *crowd) why() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.first...)
}

func (c *crowd) stopped() bool {
	select {
	case <-c.stop:
		return true
	default:
		return false
	}
}

func (c *crowd) end() finding {
	close(c.stop)
	c.wg.Wait()
	return finding{int(c.asked.Load()), int(c.failed.Load())}
}

// Timeouts of an answer, and of silence on a QUIC connection; silence is the only sign of a lost one. Both
// are longer than stalls of the machine.
const (
	requestLimit = 30 * time.Second
	quicLimit    = 10 * time.Second
)

// httpClients send requests to nginx again and again. HTTP/1.1 clients open a connection for each request,
// because wrk does not count requests lost in a listener's queue without a reset. HTTP/2 clients hold one
// each, over TLS. Like browsers, Go's client opens a new one when the server accepts no more requests
// (GOAWAY).
type httpClients struct{ crowd }

func startHTTP(ctx context.Context, h *host) *httpClients {
	c := &httpClients{crowd{stop: make(chan struct{})}}
	for i := range 6 {
		url, major := "https://"+h.addr+":8443/", 2
		if i%2 == 1 {
			url, major = "http://"+h.addr+":8080/", 1
		}
		c.wg.Go(func() {
			t := &http.Transport{TLSClientConfig: clientTLS("h2"), ForceAttemptHTTP2: true, DisableKeepAlives: major == 1,
				DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
					err = h.client.Do(func() (err error) { conn, err = (&net.Dialer{}).DialContext(ctx, network, addr); return err })
					return conn, err
				}}
			defer t.CloseIdleConnections()
			for !c.stopped() {
				if err := ask(ctx, t, url, major); err != nil {
					c.fails("HTTP", err)
				}
				c.asked.Add(1)
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	return c
}

func (c *httpClients) answered() int64 { return c.asked.Load() - c.failed.Load() }

// ask sends one request and reads its answer.
func ask(ctx context.Context, t http.RoundTripper, url string, major int) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := (&http.Client{Transport: t}).Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK || answer.ProtoMajor != major {
		return fmt.Errorf("%s over %s", answer.Status, answer.Proto)
	}
	return nil
}

// quicClients open a QUIC connection from a separate port, send a few requests over HTTP/3, close it, and
// open another. A connection is lost if it cannot be opened or ends before its client closes it.
type quicClients struct {
	crowd
	open atomic.Int64
	done atomic.Int64
}

// Lifetime of a connection, and the pause between its requests.
const (
	quicLife  = 60 * time.Millisecond // minimum; the maximum is three times as long
	quicPause = 20 * time.Millisecond
)

func startQUIC(ctx context.Context, h *host) *quicClients {
	c := &quicClients{crowd: crowd{stop: make(chan struct{})}}
	for range 3 {
		c.wg.Go(func() {
			for !c.stopped() {
				c.asked.Add(1)
				if err := c.connection(ctx, h); err != nil {
					c.fails("HTTP/3", err)
				}
				c.done.Add(1)
			}
		})
	}
	return c
}

func (c *quicClients) alive() int { return int(c.open.Load()) }

func (c *quicClients) ended() int64 { return c.done.Load() - c.failed.Load() }

// connection lives for a while; it is not replaced automatically.
func (c *quicClients) connection(ctx context.Context, h *host) error {
	var conn net.PacketConn
	if err := h.client.Do(func() (err error) { conn, err = net.ListenPacket("udp4", "0.0.0.0:0"); return err }); err != nil {
		return err
	}
	defer conn.Close()
	tr := &quic.Transport{Conn: conn}
	defer tr.Close()
	dialled := 0
	t := &http3.Transport{TLSClientConfig: clientTLS(http3.NextProtoH3), QUICConfig: &quic.Config{MaxIdleTimeout: quicLimit, HandshakeIdleTimeout: quicLimit},
		Dial: func(ctx context.Context, addr string, tls *tls.Config, cfg *quic.Config) (*quic.Conn, error) {
			if dialled++; dialled > 1 {
				return nil, fmt.Errorf("the connection ended")
			}
			to, err := net.ResolveUDPAddr("udp4", addr)
			if err != nil {
				return nil, err
			}
			return tr.DialEarly(ctx, to, tls, cfg)
		}}
	defer t.Close()
	first := true
	for end := time.Now().Add(quicLife + rand.N(2*quicLife)); time.Now().Before(end); {
		if err := ask(ctx, t, "https://"+h.addr+"/", 3); err != nil {
			if !first {
				c.open.Add(-1)
			}
			return err
		}
		if first {
			c.open.Add(1)
			first = false
		}
		time.Sleep(quicPause)
	}
	if !first {
		c.open.Add(-1)
	}
	return nil
}
