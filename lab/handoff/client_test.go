// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"bytes"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/picture/picturetest"
)

// A client detects every fault of a stream.
func TestClientSeesWrongStreams(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(at uint64, b []byte) []byte // applied to the server's bytes
		reset bool                             // the server resets the connection
		fine  bool
	}{
		{name: "right", fine: true, spoil: func(_ uint64, b []byte) []byte { return b }},
		{name: "changed", spoil: func(at uint64, b []byte) []byte {
			if at > 5000 {
				b[0]++
			}
			return b
		}},
		{name: "doubled", spoil: func(at uint64, b []byte) []byte {
			if at > 5000 {
				return append(b, b[len(b)-1])
			}
			return b
		}},
		{name: "lost", spoil: func(at uint64, b []byte) []byte {
			if at > 5000 {
				return b[1:]
			}
			return b
		}},
		{name: "reset", reset: true, spoil: func(_ uint64, b []byte) []byte { return b }},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				s, err := l.Accept()
				if err != nil {
					return
				}
				defer s.Close()
				var at uint64
				b := make([]byte, 3000)
				for {
					n, err := s.Read(b)
					if err != nil {
						return
					}
					if c.reset && at > 5000 {
						_ = s.(*net.TCPConn).SetLinger(0)
						return
					}
					said := append([]byte(nil), b[:n]...)
					scramble(said, at)
					said = c.spoil(at, said)
					at += uint64(n)
					if _, err := s.Write(said); err != nil {
						return
					}
				}
			}()
			conn, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			one := &client{Conn: conn, size: 2000, pause: time.Millisecond, seed: 1}
			if err := stream(t.Context(), one); err != nil {
				t.Fatal(err)
			}
			// Until the client must have noticed: bytes from 5000 on are spoilt.
			nstest.Eventually(t, func() error {
				one.mu.Lock()
				enough := one.err != nil || one.heard > 20_000
				one.mu.Unlock()
				if enough {
					return nil
				}
				return errors.New("the stream stalled")
			})
			v := one.finish()
			if fine := v.err == nil && v.lost == 0 && v.duplicated == 0 && !v.reset; fine != c.fine {
				t.Errorf("%+v", v)
			}
			if v.reset != c.reset {
				t.Errorf("reset: %v, want %v", v.reset, c.reset)
			}
		})
	}
}

func TestGap(t *testing.T) {
	begin := time.Now()
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	c := &client{arrivals: []time.Time{at(0), at(1), at(2), at(10), at(11), at(12)}}
	for _, g := range []struct{ from, to, want int }{{0, 1, 1}, {3, 4, 8}, {2, 3, 8}, {11, 12, 1}, {12, 20, 0}, {-5, 100, 8}} {
		if got := c.gap(at(g.from), at(g.to)); got != time.Duration(g.want)*time.Millisecond {
			t.Errorf("from %d to %d: %s, want %d ms", g.from, g.to, got, g.want)
		}
	}
}

func TestPicture(t *testing.T) {
	var slow []time.Duration
	for i := range 5000 {
		slow = append(slow, time.Duration(i)*time.Millisecond/10)
	}
	b := picture([]curve{{name: "a", solid: true, times: slow}, {name: "b"}})
	for _, problem := range picturetest.PlotProblems(b) {
		t.Error(problem)
	}
	if !bytes.HasPrefix(b, []byte("<svg ")) || bytes.Count(b, []byte("<polyline")) != 2 || bytes.Contains(b, []byte("NaN")) {
		t.Errorf("%s", b[:min(len(b), 2000)])
	}
	if len(b) > 40<<10 {
		t.Errorf("%d bytes", len(b))
	}
}

// Runs with and without moving have the same requests at the same moments, with the load of the setting.
func TestArrivals(t *testing.T) {
	const long = 200 * time.Second
	s := skewed
	of := map[int]time.Duration{}
	all := s.arrivals(7, long)
	for i, a := range all {
		if i > 0 && a.at < all[i-1].at {
			t.Fatal("not in order")
		}
		for _, w := range a.work {
			of[a.host] += w
		}
	}
	for host, want := range map[int]float64{1: s.light + s.heavy, 2: s.light} {
		if got := of[host].Seconds() / long.Seconds() / float64(s.workers); got < want*0.9 || got > want*1.1 {
			t.Errorf("server %d has a load of %.2f, want %.2f", host, got, want)
		}
	}
	s.threshold = 0
	for i, a := range s.arrivals(7, long) {
		if a.at != all[i].at || a.host != all[i].host {
			t.Fatal("different requests without moving")
		}
	}
}
