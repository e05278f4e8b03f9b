// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// cable forwards connections to an address. A pulled cable forwards nothing and closes nothing.
type cable struct {
	pulled sync.RWMutex
}

func (c *cable) to(t *testing.T, address string) (at string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", address)
			if err != nil {
				near.Close()
				continue
			}
			go c.pass(near, far)
			go c.pass(far, near)
		}
	}()
	return l.Addr().String()
}

func (c *cable) pass(from, to net.Conn) {
	defer to.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		c.pulled.RLock()
		if err == nil {
			_, err = to.Write(b[:n])
		}
		c.pulled.RUnlock()
		if err != nil {
			if err != io.EOF {
				from.Close()
			}
			return
		}
	}
}

// TestPartnerSilent checks that a partner behind a pulled cable stays connected until the agent
// gives up. Status reports the silence meanwhile, and the absence later.
func TestPartnerSilent(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{1, 0}, {0, 1}})
	var c cable
	until := func(what string, ok func(s *PairStatus) bool) {
		t.Helper()
		nstest.Eventually(t, func() error {
			s, err := p.agents[1].Status()
			if err != nil {
				t.Fatal(err)
			}
			if ok(s.Partner) {
				return nil
			}
			return fmt.Errorf("%s: %+v", what, s.Partner)
		})
	}
	p.start(1)
	until("never there", func(s *PairStatus) bool { return !s.Connected && s.Silent == -1 })
	address := p.listen[1]
	p.listen[1] = c.to(t, address)
	p.start(0)
	until("heard", func(s *PairStatus) bool { return s.Connected && s.Silent == 0 })
	c.pulled.Lock()
	until("silent", func(s *PairStatus) bool { return s.Connected && s.Silent > 3*pingEvery.Seconds() })
	c.pulled.Unlock()
	until("heard again", func(s *PairStatus) bool { return s.Connected && s.Silent == 0 })
	p.ends[0]()
	until("gone", func(s *PairStatus) bool { return !s.Connected && s.Silent > 0 })
}
