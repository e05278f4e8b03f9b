// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/lab/topo"
)

func init() {
	Register(Demo{
		Name:  "reroute",
		Short: "a cable beside FRR's bfdd is cut; a ping goes on by another way",
		Needs: []string{"bfdd", "ip"},
		Run:   func(ctx context.Context, s *Stage) error { return (&rerouting{Stage: s}).run(ctx) },
	})
}

// rerouting is the demonstration of reroute. Routers r1 (weir) and r2 (FRR) have a link, and a way around it
// by r3. Answers always come back by r3. The link is a cable through a bridge: unplugged there, no end loses
// its carrier.
type rerouting struct {
	*Stage
	s, r1, r2, r3, d, wire *Host
	ping                   pinger

	mu   sync.Mutex
	link string
}

func (d *rerouting) run(ctx context.Context) error {
	return all(ctx, d.build, d.routes, d.frr, d.weir, d.cut, d.heal)
}

func (d *rerouting) build(ctx context.Context) (err error) {
	d.link = "up"
	for label, h := range map[string]**Host{"s": &d.s, "r1": &d.r1, "r2": &d.r2, "r3": &d.r3, "d": &d.d, "wire": &d.wire} {
		if *h, err = d.Host(label); err != nil {
			return err
		}
		for _, v := range []string{"net.ipv6.conf.all.forwarding", "net.ipv4.ip_forward"} {
			if err := topo.Sysctl((*h).Handle, v, "1"); err != nil {
				return err
			}
		}
	}
	for _, c := range []struct {
		a              *Host
		deviceA, addrA string
		b              *Host
		deviceB, addrB string
	}{
		{d.s, "out", "fd00:a::2/64", d.r1, "in", "fd00:a::1/64"},
		{d.r1, "r13", "fd00:13::1/64", d.r3, "r31", "fd00:13::3/64"},
		{d.r3, "r32", "fd00:32::3/64", d.r2, "r23", "fd00:32::2/64"},
		{d.r2, "out", "fd00:d::1/64", d.d, "in", "fd00:d::2/64"},
	} {
		if err := Cable(c.a, c.deviceA, c.addrA, c.b, c.deviceB, c.addrB); err != nil {
			return err
		}
	}
	if err := d.bridge(); err != nil {
		return err
	}
	d.Live(d.picture)
	return d.Say(ctx, "a router loses a link without losing the carrier: a switch or a converter between the ends fails")
}

// bridge connects r1 and r2 by two ports of a bridge.
func (d *rerouting) bridge() error {
	for _, e := range []struct {
		h            *Host
		device, port string
		addr6, addr4 string
	}{{h: d.r1, device: "r12", port: "p1", addr6: "fd00:12::1/64", addr4: "10.12.0.1/24"}, {h: d.r2, device: "r21", port: "p2", addr6: "fd00:12::2/64", addr4: "10.12.0.2/24"}} {
		err := topo.Cable(topo.End{NS: e.h.Handle, Name: e.device, Addrs: prefixes(e.addr6, e.addr4)}, topo.End{NS: d.wire.Handle, Name: e.port})
		if err != nil {
			return err
		}
	}
	err := d.wire.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "cable"
		b := &netlink.Bridge{LinkAttrs: attrs}
		return errors.Join(netlink.LinkAdd(b), netlink.LinkSetUp(b))
	})
	return errors.Join(err, d.plug("p1"), d.plug("p2"))
}

// plug connects a port of the bridge.
func (d *rerouting) plug(port string) error {
	return d.wire.Do(func() error {
		b, err := netlink.LinkByName("cable")
		if err != nil {
			return err
		}
		p, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(p, b)
	})
}

func (d *rerouting) unplug(port string) error {
	return d.wire.Do(func() error {
		p, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		return netlink.LinkSetNoMaster(p)
	})
}

func (d *rerouting) routes(ctx context.Context) error {
	for _, r := range []struct {
		h     *Host
		route string
	}{
		{d.s, "default via fd00:a::1"}, {d.d, "default via fd00:d::1"},
		{d.r1, "fd00:d::/64 via fd00:12::2"}, {d.r2, "fd00:a::/64 via fd00:32::3"},
		{d.r3, "fd00:d::/64 via fd00:32::2"}, {d.r3, "fd00:a::/64 via fd00:13::1"},
	} {
		if _, err := r.h.Exec(ctx, "ip", append([]string{"-6", "route", "add"}, strings.Fields(r.route)...)...); err != nil {
			return err
		}
	}
	if err := d.ping.start(ctx, d.Stage, d.s, "fd00:d::2"); err != nil {
		return err
	}
	return d.ping.goesOn(ctx)
}

// frr starts bfdd on r2.
func (d *rerouting) frr(context.Context) error {
	home := filepath.Join(d.Dir, "bfdd")
	if err := errors.Join(os.MkdirAll(home, 0o777), os.Chmod(home, 0o777)); err != nil { // FRR runs as a separate user
		return err
	}
	config := "bfd\n peer 10.12.0.1 local-address 10.12.0.2\n  detect-multiplier 5\n  receive-interval 300\n  transmit-interval 300\n  echo receive-interval 10\n  no shutdown\n exit\nexit\n"
	file := func(name string) string { return filepath.Join(home, name) }
	if err := os.WriteFile(file("bfdd.conf"), []byte(config), 0o644); err != nil {
		return err
	}
	_, err := d.r2.Daemon("bfdd", "bfdd", "-f", file("bfdd.conf"), "-i", file("pid"), "-z", file("zserv"), "--vty_socket", home, "-P", "0", "--bfdctl", file("ctl"))
	return err
}

// weir protects the link on r1.
func (d *rerouting) weir(ctx context.Context) error {
	if err := d.Say(ctx, "r2 runs FRR's bfdd. On r1 weir's kernel programs speak BFD with it and know the way around by r3"); err != nil {
		return err
	}
	file, err := d.File("weir.yaml", `reroute:
  - name: core
    interface: r12
    repairs: [{interface: r13, via: "fd00:13::3"}]
    bfd: {peer: 10.12.0.2, interval: 300ms, multiplier: 5, echo: 10ms}
`)
	if err != nil {
		return err
	}
	if _, err := d.r1.Type(ctx, "apply", "-f", file); err != nil {
		return err
	}
	d.Typed("weir serve &")
	if _, err := d.r1.Serve(); err != nil {
		return err
	}
	if err := within(ctx, patience, "the BFD session is up", func() error { return d.says(ctx, "up") }); err != nil {
		return err
	}
	_, err = d.r1.Type(ctx, "reroute", "status", "core")
	return err
}

// says reports whether the status of the BFD session is this state.
func (d *rerouting) says(ctx context.Context, state string) error {
	out, err := d.r1.Run(ctx, "reroute", "status", "core", "--json")
	if err != nil {
		return err
	}
	var report struct {
		BFD []struct {
			State string `json:"state"`
		} `json:"bfd"`
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		return fmt.Errorf("weir reroute status --json: %w: %.200s", err, out)
	}
	for _, s := range report.BFD {
		if s.State == state {
			return nil
		}
	}
	return fmt.Errorf("sessions: %+v", report.BFD)
}

// cut unplugs the cable.
func (d *rerouting) cut(ctx context.Context) error {
	if err := d.Say(ctx, "the cable is cut. Each end keeps its carrier, and the routes stay as they are"); err != nil {
		return err
	}
	sent, lost := d.ping.counts()
	d.mark("down")
	if err := errors.Join(d.unplug("p1"), d.unplug("p2")); err != nil {
		return err
	}
	if err := d.ping.goesOn(ctx); err != nil {
		return err
	}
	if err := pause(ctx, 2*time.Second); err != nil {
		return err
	}
	now, gone := d.ping.counts()
	gap := time.Duration(gone-lost) * pingEvery
	d.Check(gone-lost < (now-sent)/4, "the ping goes on: %d of %d lost, a gap of %s", gone-lost, now-sent, gap)
	d.Sum("Cable cut: the ping went on after a gap of %s (%d packets lost).", gap, gone-lost)
	if _, err := d.r1.Type(ctx, "reroute", "status", "core"); err != nil {
		return err
	}
	d.Still() // with the cut cable
	return d.Pace(ctx, 2*time.Second)
}

// heal plugs the cable in again.
func (d *rerouting) heal(ctx context.Context) error {
	if err := d.Say(ctx, "the cable is back. The session comes up again, and the link is used"); err != nil {
		return err
	}
	_, lost := d.ping.counts()
	if err := errors.Join(d.plug("p1"), d.plug("p2")); err != nil {
		return err
	}
	if err := within(ctx, patience, "the BFD session is up again", func() error { return d.says(ctx, "up") }); err != nil {
		return err
	}
	d.mark("up")
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	_, now := d.ping.counts()
	d.Check(now-lost <= 2, "back on the link: %d packets lost", now-lost)
	d.Sum("Cable back: %d packets lost.", now-lost)
	_, err := d.r1.Type(ctx, "reroute", "status", "core")
	return err
}

func (d *rerouting) mark(link string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.link = link
}

func (d *rerouting) picture() []string {
	sent, lost := d.ping.counts()
	d.mu.Lock()
	defer d.mu.Unlock()
	wire := "──────────"
	if d.link == "down" {
		wire = "────╳ ╳───"
	}
	return []string{
		fmt.Sprintf("  s ──── r1 %s r2 ──── d       link r1–r2:  %s", wire, d.link),
		"          └─── r3 ─────┘",
		"",
		fmt.Sprintf("ping s → d every %s: %d sent, %d lost", pingEvery, sent, lost),
	}
}

// pingEvery is the interval of the pings.
const pingEvery = 5 * time.Millisecond

// pinger sends ICMPv6 echo requests and counts the answers.
type pinger struct {
	mu       sync.Mutex
	sent     []bool // answered, by number
	answered int
}

// grace is the time of an answer. Younger requests are not lost yet.
const grace = 200 * time.Millisecond

func (p *pinger) start(ctx context.Context, s *Stage, from *Host, to string) error {
	ctx, cancel := context.WithCancel(ctx)
	var conn net.PacketConn
	if err := from.Do(func() (err error) { conn, err = net.ListenPacket("ip6:ipv6-icmp", "::"); return err }); err != nil {
		cancel()
		return err
	}
	s.OnClose(func() { cancel(); conn.Close() })
	address := &net.IPAddr{IP: net.ParseIP(to)}
	go func() {
		b := make([]byte, 1500)
		for {
			n, _, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			if n >= 16 && b[0] == 129 {
				p.answer(binary.BigEndian.Uint64(b[8:]))
			}
		}
	}()
	go func() {
		tick := time.NewTicker(pingEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			<-tick.C
			request := []byte{128, 0, 0, 0, 0x77, 0x65, 0, 0}
			_, _ = conn.WriteTo(binary.BigEndian.AppendUint64(request, p.next()), address)
		}
	}()
	return nil
}

func (p *pinger) next() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent = append(p.sent, false)
	return uint64(len(p.sent) - 1)
}

func (p *pinger) answer(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n < uint64(len(p.sent)) && !p.sent[n] {
		p.sent[n] = true
		p.answered++
	}
}

// counts returns the number of requests older than the grace, and of the lost ones among them.
func (p *pinger) counts() (sent, lost int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := max(0, len(p.sent)-int(grace/pingEvery))
	for _, ok := range p.sent[:old] {
		if !ok {
			lost++
		}
	}
	return old, lost
}

// goesOn waits for 20 more answers.
func (p *pinger) goesOn(ctx context.Context) error {
	p.mu.Lock()
	begin := p.answered
	p.mu.Unlock()
	return within(ctx, patience, "the ping is answered", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.answered < begin+20 {
			return fmt.Errorf("%d answers", p.answered-begin)
		}
		return nil
	})
}
