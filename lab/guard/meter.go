// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os/exec"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/guard/scenario"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab/topo"
)

// meterRate is the rate of nftables' meter, in packets per second of each source. An operator would choose
// it for clients with one or two packets per second, under a limit of 1,000.
const meterRate = 20

// meterRules drop each source's packets above the rate.
const meterRules = `table inet lab {
 set m4 { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 60s; }
 chain c {
  type filter hook input priority 0; policy accept;
  udp dport 5353 add @m4 { ip saddr limit rate over %d/second burst %[1]d packets } counter drop
 }
}
`

// metered are the cold starts to replay on real sockets. The value tells whether weir runs beside nftables.
var metered = map[string]bool{"start_net24_100": false, "start_net24_200": true, "start_net24_400": true, "start_nets24_600": false}

// meters replays cold starts on real sockets, all at once, each in its own namespace: nftables has no
// virtual clock.
func (x *experiment) meters(ctx context.Context) error {
	if _, err := exec.LookPath("nft"); err != nil {
		x.result.Skip("nftables is not installed: no measurement of its meter")
		return nil
	}
	x.say("cold starts on real sockets, compared with nftables' meter of %d pps a source", meterRate)
	var all []*replay
	defer func() {
		for _, r := range all {
			r.close()
		}
	}()
	for name, both := range metered {
		s, err := scenario.Lookup(name)
		if err != nil {
			return err
		}
		r, err := x.newReplay(ctx, s.Shortened(), "nft_", fmt.Sprintf(meterRules, meterRate))
		if err != nil {
			return err
		}
		all = append(all, r)
		if both {
			if r, err = x.newReplay(ctx, s.Shortened(), "sockets_", ""); err != nil {
				return err
			}
			all = append(all, r)
		}
	}
	var wg sync.WaitGroup
	errs := make([]error, len(all))
	for i, r := range all {
		wg.Go(func() { errs[i] = r.run(ctx, x.env.Seed) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	least := map[string]float64{"nft_": math.Inf(1), "sockets_": math.Inf(1)}
	for _, r := range all {
		kept := float64(r.got) / float64(r.sent)
		x.result.Set(r.name+"newcomers_kept_"+r.Name, kept)
		least[r.name] = min(least[r.name], kept)
	}
	for name, kept := range least {
		x.result.Set(name+"cold_start_kept_min", kept)
	}
	return nil
}

// replay is a scenario on real sockets, in real time.
type replay struct {
	scenario.Scenario
	name    string // prefix of the metrics' names
	ns      *netns.Handle
	server  *net.UDPConn
	detach  func()
	sources map[scenario.Source]*net.UDPConn

	sent, got int // packets of clients, from Settle on
}

// newReplay limits a socket by a ruleset of nftables, or by the guard without a ruleset.
func (x *experiment) newReplay(ctx context.Context, s scenario.Scenario, name, rules string) (r *replay, err error) {
	r = &replay{Scenario: s, name: name, detach: func() {}, sources: map[scenario.Source]*net.UDPConn{}}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	ns, nsName, err := x.env.Namespace(name[:3] + s.Name[len("start_"):])
	if err != nil {
		return nil, err
	}
	r.ns = ns
	own := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/23"), netip.MustParsePrefix("192.0.4.0/24"), netip.MustParsePrefix("203.0.113.0/24")}
	if err := errors.Join(topo.Addresses(ns), topo.Own(ns, own...)); err != nil {
		return nil, err
	}
	err = ns.Do(func() error {
		var err error
		r.server, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 5353})
		return err
	})
	if err != nil {
		return nil, err
	}
	_ = r.server.SetReadBuffer(1 << 20) // as far as the kernel allows
	if rules != "" {
		return r, x.env.NFT(ctx, nsName, rules)
	}
	r.detach, err = x.ours.attach(r.server, s.Limit)
	return r, err
}

func (r *replay) close() {
	r.detach()
	for _, c := range r.sources {
		c.Close()
	}
	if r.server != nil {
		r.server.Close()
	}
}

// source returns the socket of a source. It has one port, although attackers change theirs.
func (r *replay) source(p *scenario.Packet) (*net.UDPConn, error) {
	if c := r.sources[p.Src]; c != nil {
		return c, nil
	}
	a := p.Src.IPv4()
	var c *net.UDPConn
	err := r.ns.Do(func() error {
		var err error
		c, err = net.DialUDP("udp4", &net.UDPAddr{IP: a[:]}, r.server.LocalAddr().(*net.UDPAddr))
		return err
	})
	if err != nil {
		return nil, err
	}
	r.sources[p.Src] = c
	return c, nil
}

// run sends the trace, each packet at its time or as soon after as this machine allows.
func (r *replay) run(ctx context.Context, seed uint64) error {
	read := make(chan error, 1)
	go func() { read <- r.read() }()
	t := r.Trace(seed)
	packets := t.All()
	for i := range packets {
		if _, err := r.source(&packets[i]); err != nil {
			return err
		}
	}
	start := time.Now()
	settled := t.Start() + uint64(r.From+r.WarmUp)
	for i := range packets {
		p := &packets[i]
		at := start.Add(time.Duration(p.At - t.Start()))
		if time.Until(at) > 500*time.Microsecond && !sleepUntil(ctx, at) {
			return ctx.Err()
		}
		counted := p.Class == scenario.Newcomer && p.At >= settled
		payload := byte(0)
		if counted {
			r.sent++
			payload = 1
		}
		c, err := r.source(p)
		if err != nil {
			return err
		}
		_, _ = c.Write([]byte{payload}) // a packet rejected in transit counts as not received
	}
	// Loopback delivers before a write returns, but the reader may lag.
	_ = r.server.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	return <-read
}

// read counts the clients' packets arriving until the deadline.
func (r *replay) read() error {
	b := make([]byte, 16)
	for {
		n, err := r.server.Read(b)
		if errors.Is(err, net.ErrClosed) || isTimeout(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if n > 0 && b[0] == 1 {
			r.got++
		}
	}
}
