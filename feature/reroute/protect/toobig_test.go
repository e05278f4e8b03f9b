// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"strings"
	"testing"
	"time"
)

// A link farther along the repair takes less than its first one: what a router says of that is
// logged, with the size that mends it; with that size the sender is told, and it arrives.
func TestTooBigOnTheWay(t *testing.T) {
	w := newWorld(t)
	w.ip(w.r3, "link set r2 mtu 1400")
	w.ip(w.r2, "link set back mtu 1400")
	w.apply(w.path(around()))
	log := &heardLog{testLog: testLog{t}}
	stop := w.serveTo(log)
	w.drain(true)
	p := w.pair(true)
	if p.arrives(1352, time.Second) { // 1,400 bytes, and the outer headers
		t.Fatal("the link of 1,400 bytes takes more")
	}
	w.until("it is logged", func() bool { // of the first packet nobody may have heard
		p.arrives(1352, 10*time.Millisecond)
		return log.count("too big for a link on the way") > 0
	})
	log.mu.Lock()
	if all := strings.Join(log.lines, "\n"); !strings.Contains(all, "1400") || !strings.Contains(all, "core") {
		t.Errorf("said %s", all)
	}
	log.mu.Unlock()
	stop()
	r := around()
	r.MTU = 1400
	w.apply(w.path(r))
	if p.arrives(1352, time.Second) {
		t.Fatal("a packet of 1,400 bytes with outer headers has passed a link of 1,400")
	}
	if mtu := p.mtu(t); mtu >= 1400 || mtu < 1280 {
		t.Errorf("the sender has learnt of %d bytes", mtu)
	}
	if !p.arrives(p.mtu(t)-48, patience) {
		t.Error("what fits does not arrive")
	}
}

// What is no message about a repair is not one; neither is one that could not be.
func TestParseTooBig(t *testing.T) {
	good := make([]byte, icmp6HeaderLen+ip6HeaderLen)
	good[0], good[6], good[7] = icmp6TooBig, 1400>>8, 1400&0xff
	good[icmp6HeaderLen], good[icmp6HeaderLen+6] = 0x60, 43
	if m, ok := parseTooBig(good); !ok || m.mtu != 1400 {
		t.Errorf("%+v, %t", m, ok)
	}
	for what, change := range map[string]func(b []byte) []byte{
		"cut":             func(b []byte) []byte { return b[:len(b)-1] },
		"empty":           func([]byte) []byte { return nil },
		"another message": func(b []byte) []byte { b[0] = 3; return b },
		"quotes TCP":      func(b []byte) []byte { b[icmp6HeaderLen+6] = 6; return b },
		"quotes IPv4":     func(b []byte) []byte { b[icmp6HeaderLen] = 0x45; return b },
		"less than IPv6":  func(b []byte) []byte { b[6], b[7] = 0, 100; return b },
		"more than any":   func(b []byte) []byte { b[4] = 1; return b },
	} {
		if m, ok := parseTooBig(change(append([]byte(nil), good...))); ok {
			t.Errorf("%s: read as %+v", what, m)
		}
	}
}
