// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/protect/neigh"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// asksAfter sets the silent time before a question.
func asksAfter(t *testing.T, d time.Duration) {
	was := askAfter
	askAfter = d
	t.Cleanup(func() { askAfter = was })
}

// entry returns r1's link address of a neighbour.
func (w *world) entry(dev, addr string) string {
	w.Helper()
	text := w.ip(w.r1, "neigh show "+addr+" dev "+dev)
	if strings.Contains(addr, ":") {
		text = w.ip(w.r1, "-6 neigh show "+addr+" dev "+dev)
	}
	_, after, _ := strings.Cut(text, "lladdr ")
	mac, _, _ := strings.Cut(after, " ")
	return mac
}

const (
	main6, main4, back6 = "fd00:12::2", "10.12.0.2", "fd00:13::3"
	newMAC, newerMAC    = "02:00:00:00:00:99", "02:00:00:00:00:98"
)

// A neighbour with a new link address is found without probes, by its announcement or by its answer. This holds on a
// used and on an unused link, and for a backup.
func TestFollowsNeighbours(t *testing.T) {
	for name, c := range map[string]struct {
		after time.Duration
		tells bool // the neighbour announces its address
		down  bool
	}{
		"asked":               {100 * time.Millisecond, false, false},
		"gratuitous":          {time.Hour, true, false},
		"while it is drained": {time.Hour, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			asksAfter(t, c.after)
			w := newWorld(t)
			if c.tells {
				w.sysctls(w.r2, "net/ipv4/conf/main/arp_notify=1", "net/ipv6/conf/main/ndisc_notify=1")
			}
			w.ip(w.r1, "neigh add fd00:12::77 lladdr 02:00:00:00:00:77 dev main nud permanent") // the operator's
			w.apply(w.path(around()))
			w.serveNow()
			p6, p4 := w.pair(true), w.pair(false)
			if !p6.arrives(100, patience) || !p4.arrives(100, patience) {
				t.Fatal("nothing arrives before")
			}
			w.until("neighbours are kept", func() bool {
				return strings.Contains(w.ip(w.r1, "-6 neigh show dev main"), main6+" lladdr")
			})
			if c.down {
				w.drain(true)
			}
			w.ip(w.r2, "link set main address "+newMAC)
			w.until("the neighbour is found again", func() bool { return w.entry("main", main6) == newMAC && w.entry("main", main4) == newMAC })
			if !strings.Contains(w.ip(w.r1, "-6 neigh show "+main6+" dev main"), "PERMANENT") {
				t.Error("its entry is not permanent")
			}
			w.drain(false)
			if !p6.arrives(100, patience) || !p4.arrives(100, patience) {
				t.Error("nothing arrives by the link")
			}
			if c.after < time.Hour {
				w.drain(true)
				w.ip(w.r3, "link set r1 address "+newerMAC)
				w.until("the backup's neighbour is found again", func() bool { return w.entry("back", back6) == newerMAC })
				w.until("packets are rerouted", func() bool { return p6.arrives(100, time.Second) && p4.arrives(100, time.Second) })
			}
			if got := w.entry("main", "fd00:12::77"); got != "02:00:00:00:00:77" {
				t.Errorf("the operator's entry has become %s", got)
			}
		})
	}
}

// A claimed address is rejected while the neighbour still answers at the old one.
func TestNeighbourAnswers(t *testing.T) {
	asksAfter(t, time.Hour)
	w := newWorld(t)
	const silent = "10.12.0.50"
	w.ip(w.r2, "addr add "+silent+"/24 dev main")
	w.ip(w.r1, "route add 10.66.0.0/16 via "+silent)
	w.apply(w.path(around()))
	w.serveNow()
	w.until("neighbours are kept", func() bool {
		return strings.Count(w.ip(w.r1, "-4 neigh show dev main"), "PERMANENT") == 2
	})
	mac := w.entry("main", main4)
	w.ip(w.r2, "addr del "+silent+"/24 dev main")
	w.until("what nobody answers for is taken", func() bool { // claims may precede the watcher's list of kept neighbours
		w.claims(w.r2, "main", main4, newMAC)
		w.claims(w.r2, "main", silent, newMAC)
		return nstest.Poll(2*time.Second, func() error {
			if at := w.entry("main", silent); at != newMAC {
				return fmt.Errorf("%s is at %s", silent, at)
			}
			return nil
		}) == nil
	})
	if got := w.entry("main", main4); got != mac {
		t.Errorf("the neighbour that answers is at %s, want %s", got, mac)
	}
}

// claims sends a gratuitous ARP packet.
func (w *world) claims(ns *netns.Handle, dev, addr, mac string) {
	w.Helper()
	m, err := net.ParseMAC(mac)
	if err != nil {
		w.Fatal(err)
	}
	p := neigh.ARP{Kind: 1, Proto: unix.ETH_P_IP, Len: 6, PLen: 4, Op: 1, SHA: [6]byte(m), SPA: addrs(addr)[0].As4(), TPA: addrs(addr)[0].As4()}
	b, err := binary.Append(nil, binary.BigEndian, p)
	if err != nil {
		w.Fatal(err)
	}
	w.in(ns, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{Protocol: neigh.Network(unix.ETH_P_ARP), Ifindex: nstest.Ifindex(w, ns, dev), Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}
		return unix.Sendto(fd, b, 0, to)
	})
}
