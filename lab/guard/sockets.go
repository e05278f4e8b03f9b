// SPDX-License-Identifier: Apache-2.0

package guards

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab/topo"
)

// Real sockets have a limit of 100 pps. 20 clients of 2 pps send to each, every one from its own address,
// and one flow floods it.
const (
	socketLimit   = 100
	socketClients = 20
	clientGap     = 500 * time.Millisecond
	floodPPS      = 10_000
	payloadBytes  = 64 // random, in every datagram
)

// network is one address family, with the addresses of its clients.
type network struct {
	name   string // in metrics
	udp    string
	server netip.Addr // also the flood's source
	client func(i int) netip.Prefix
}

var networks = []network{
	{"ipv4", "udp4", netip.MustParseAddr("127.0.0.1"), func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 1, byte(i), byte(i)}), 32)
	}},
	{"ipv6", "udp6", netip.IPv6Loopback(), func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 5: byte(i), 7: byte(i), 15: 1}), 128) // a /48 each
	}},
}

// sockets floods real sockets, of both families and under both guards at once.
func (x *experiment) sockets(ctx context.Context) error {
	x.say("real sockets, %s of clients alone, then %s of random payload at %d pps against a limit of %d", x.warm, x.flood, floodPPS, socketLimit)
	ns, _, err := x.env.Namespace("sockets")
	if err != nil {
		return err
	}
	if err := topo.Addresses(ns); err != nil {
		return err
	}
	var all []*service
	defer func() {
		for _, s := range all {
			s.close()
		}
	}()
	for _, n := range networks {
		if n.server.Is6() {
			var own []netip.Prefix
			for i := range socketClients {
				own = append(own, n.client(i+1))
			}
			if err := topo.Addresses(ns, own...); err != nil {
				return err
			}
		}
		for _, who := range []*side{x.ours, &theirs} {
			s, err := newService(ns, n, who, x.env.Seed)
			if err != nil {
				return fmt.Errorf("%s%s: %w", who.name, n.name, err)
			}
			all = append(all, s)
		}
	}
	var wg sync.WaitGroup
	errs := make([]error, len(all))
	for i, s := range all {
		wg.Go(func() { errs[i] = s.run(ctx, x.warm, x.flood) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	for _, s := range all {
		s.report(x)
	}
	return nil
}

// service is a limited socket with its senders and its received datagrams.
type service struct {
	network
	side    *side
	server  *net.UDPConn
	flooder *net.UDPConn
	clients []*net.UDPConn
	detach  func()
	seed    uint64

	got        []arrival
	sentLegit  int // during the flood
	sentFlood  int
	begin, end time.Time
}

// arrival is a passed datagram.
type arrival struct {
	at    time.Time // the kernel's receive time, before any filter; not the time of our read
	legit bool
}

func newService(ns *netns.Handle, n network, who *side, seed uint64) (s *service, err error) {
	s = &service{network: n, side: who, detach: func() {}, seed: seed}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	err = ns.Do(func() error {
		var err error
		if s.server, err = net.ListenUDP(n.udp, &net.UDPAddr{IP: n.server.AsSlice()}); err != nil {
			return err
		}
		_ = s.server.SetReadBuffer(1 << 20) // as far as the kernel allows; it is read all the time
		if err := stamp(s.server); err != nil {
			return err
		}
		to := s.server.LocalAddr().(*net.UDPAddr)
		if s.flooder, err = net.DialUDP(n.udp, nil, to); err != nil {
			return err
		}
		for i := range socketClients {
			from := n.client(i + 1).Addr()
			c, err := net.DialUDP(n.udp, &net.UDPAddr{IP: from.AsSlice()}, to)
			if err != nil {
				return fmt.Errorf("client %s: %w", from, err)
			}
			s.clients = append(s.clients, c)
		}
		detach, err := who.attach(s.server, socketLimit)
		if err == nil {
			s.detach = detach
		}
		return err
	})
	return s, err
}

func (s *service) close() {
	s.detach()
	for _, c := range append(s.clients, s.server, s.flooder) {
		if c != nil {
			c.Close()
		}
	}
}

// run starts the clients, and after a while the flood too.
func (s *service) run(ctx context.Context, warm, flood time.Duration) error {
	read := make(chan error, 1)
	go func() { read <- s.read() }()
	start := time.Now()
	s.begin = start.Add(warm)
	s.end = s.begin.Add(flood)
	sent := make([]int, len(s.clients))
	var wg sync.WaitGroup
	for i, c := range s.clients {
		wg.Go(func() {
			// Each has its own phase.
			sent[i] = s.send(ctx, c, i, start.Add(clientGap*time.Duration(i)/socketClients), clientGap, 1)
		})
	}
	const burst = time.Millisecond
	s.sentFlood = s.send(ctx, s.flooder, len(s.clients), s.begin, burst, int(floodPPS*burst/time.Second))
	wg.Wait()
	for _, n := range sent {
		s.sentLegit += n
	}
	// Loopback delivers before a write returns, but the reader may lag.
	_ = s.server.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	return <-read
}

// send sends n datagrams every interval until the end, and returns the number sent during the flood.
func (s *service) send(ctx context.Context, c *net.UDPConn, who int, next time.Time, interval time.Duration, n int) (during int) {
	r := rand.NewChaCha8([32]byte{byte(s.seed), byte(s.seed >> 8), byte(who)})
	b := make([]byte, payloadBytes)
	for ; next.Before(s.end) && sleepUntil(ctx, next); next = next.Add(interval) {
		for range n {
			_, _ = r.Read(b) // never fails
			if now := time.Now(); !now.Before(s.begin) && now.Before(s.end) {
				during++
			}
			_, _ = c.Write(b) // a packet rejected in transit counts as not received
		}
	}
	return during
}

// sleepUntil returns false after an interruption of the run.
func sleepUntil(ctx context.Context, at time.Time) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(time.Until(at)):
		return ctx.Err() == nil
	}
}

// read records arrivals until the deadline.
func (s *service) read() error {
	b, control := make([]byte, 2*payloadBytes), make([]byte, 128)
	for {
		_, n, _, from, err := s.server.ReadMsgUDPAddrPort(b, control)
		if errors.Is(err, net.ErrClosed) || isTimeout(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		at, err := parseStamp(control[:n])
		if err != nil {
			return err
		}
		s.got = append(s.got, arrival{at, from.Addr().Unmap() != s.network.server})
	}
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// report sets the metrics from the packets passed during the flood, by the kernel's clock.
func (s *service) report(x *experiment) {
	accepted, legit := 0, 0
	for _, a := range s.got {
		if a.at.Before(s.begin) || !a.at.Before(s.end) {
			continue
		}
		accepted++
		if a.legit {
			legit++
		}
	}
	seconds := s.end.Sub(s.begin).Seconds()
	n := s.side.name + s.name
	x.result.Set(n+"_random_payload_accepted_ratio", float64(accepted)/seconds/socketLimit)
	x.result.Set(n+"_random_payload_flood_pps", float64(s.sentFlood)/seconds)
	if s.sentLegit > 0 && x.warm > 0 {
		x.result.Set(n+"_random_payload_legit_kept", float64(legit)/float64(s.sentLegit))
	}
	if float64(s.sentFlood) < 3*socketLimit*seconds {
		x.result.Note("%s: the flood reached only %.0f pps, hardly a test of a limit of %d", n, float64(s.sentFlood)/seconds, socketLimit)
	}
}
