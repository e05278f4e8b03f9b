// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

const nobody = 65534

// datagram sends a datagram as an unprivileged user does: by a UDP socket, with hop limit 255.
func datagram(t *testing.T, ns *netns.Handle, uid int, from, to netip.AddrPort, payload []byte) {
	t.Helper()
	err := ns.Do(func() error {
		family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_TTL
		address := func(a netip.AddrPort) unix.Sockaddr {
			if a.Addr().Is4() {
				return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
			}
			return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
		}
		if to.Addr().Is6() {
			family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return errors.Join(unix.Fchown(fd, uid, -1), unix.SetsockoptInt(fd, level, option, bfdtest.HopLimit),
			unix.Bind(fd, address(from)), unix.Sendto(fd, payload, 0, address(to)))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// facing starts the other end of a session in another engine, and waits until both are up.
func (s *side) facing(near Session) (far *Engine, back Session) {
	s.Helper()
	far, err := Open(s.Context(), s.root, s.there, tick)
	if err != nil {
		s.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() { far.Run(ctx, func(err error) { s.Error(err) }); close(ran) }()
	s.Cleanup(func() { cancel(); <-ran; far.Close() })
	back = near
	back.Discriminator++
	back.Local, back.Peer, back.Ifindex, back.SourcePort = near.Peer, near.Local, nstest.Ifindex(s, s.there, "w0"), 0
	if err := far.Put(s.Context(), back); err != nil {
		s.Fatal(err)
	}
	s.put(near)
	nstest.Until(s, "both ends are up", func() bool {
		st, _, err := far.Status(back.Discriminator)
		if err != nil {
			s.Fatal(err)
		}
		return st.State == bfd.Up && s.status(near).State == bfd.Up
	})
	return far, back
}

// sourcePort returns the port of a session.
func sourcePort(t *testing.T, e *Engine, discriminator uint32) (port uint16) {
	t.Helper()
	if err := e.each(func(_ uint32, c *bpf.BfdBfdSetup) {
		if c.Mine == discriminator {
			port = swap(c.SourcePort)
		}
	}); err != nil || port == 0 {
		t.Fatalf("port %d: %v", port, err)
	}
	return port
}

// An unprivileged user cannot send for a session of this host, even with all its numbers. No socket holds the
// session's port.
func TestLocalUsersDoNotSpeakForSessions(t *testing.T) {
	for name, a := range map[string][2]string{"IPv4": {"10.9.0.1", "10.9.0.2"}, "IPv6": {"fd09::1", "fd09::2"}} {
		t.Run(name, func(t *testing.T) {
			s := newSide(t)
			near := s.session(1, a[0], a[1])
			near.SourcePort = 0
			far, back := s.facing(near)
			stopped := func() uint64 {
				t.Helper()
				st, there, err := far.Status(back.Discriminator)
				if err != nil || !there {
					t.Fatal(there, err)
				}
				return st.NotAuthentic
			}
			before, refused := s.status(near), stopped()
			from := netip.AddrPortFrom(back.Local, sourcePort(t, far, back.Discriminator))
			to := netip.AddrPortFrom(near.Local, bfdtest.Port)
			p := bfdtest.Packet{Multiplier: 3, Mine: back.Discriminator, DesiredTx: time.Second, RequiredRx: time.Second}
			send := func(uid int, state bfd.State) {
				t.Helper()
				p.State = state
				datagram(t, s.there, uid, from, to, p.Append(nil))
			}
			send(nobody, bfd.Down)
			send(nobody, bfd.AdminDown)
			if n := stopped() - refused; n != 2 {
				t.Errorf("%d datagrams are counted", n)
			}
			if st := s.status(near); st.Downs != before.Downs || st.State != bfd.Up {
				t.Errorf("%+v", st)
			}
			send(0, bfd.Down) // root may send anything
			nstest.Until(s, "the session goes down", func() bool { return s.status(near).Downs == before.Downs+1 })
			if n := stopped() - refused; n != 2 {
				t.Errorf("with root's %d datagrams are counted", n)
			}
		})
	}
}

// All other datagrams of local users pass.
func TestOtherDatagramsLeave(t *testing.T) {
	s := newSide(t)
	s.put(s.session(1, "10.9.0.1", "10.9.0.2"))
	nstest.Address(t, s.here, "w0", netip.MustParsePrefix("10.9.0.11/24"))
	nstest.Address(t, s.there, "w0", netip.MustParsePrefix("10.9.0.12/24"))
	var wire int
	err := s.there.Do(func() error { wire = socket(t, nstest.Ifindex(t, s.there, "w0")); return nil })
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	look := func() {
		buf := make([]byte, 2048)
		for {
			n, _, err := unix.Recvfrom(wire, buf, 0)
			if err != nil {
				return
			}
			if n > 42 {
				seen[string(buf[42:n])] = true
			}
		}
	}
	cases := []struct {
		uid      int
		from, to string
		arrives  bool
	}{
		{nobody, "10.9.0.1:0", "10.9.0.2:3784", false},
		{nobody, "10.9.0.1:0", "10.9.0.2:3785", true},
		{nobody, "10.9.0.1:0", "10.9.0.2:4784", true},
		{nobody, "10.9.0.11:0", "10.9.0.2:3784", true}, // no session's address: the neighbour rejects it
		{nobody, "10.9.0.1:0", "10.9.0.12:3784", true},
		{0, "10.9.0.1:0", "10.9.0.2:3784", true},
	}
	payload := func(i int) string { return fmt.Sprintf("datagram %d, which is as long as some", i) }
	for i, c := range cases {
		datagram(t, s.here, c.uid, netip.MustParseAddrPort(c.from), netip.MustParseAddrPort(c.to), []byte(payload(i)))
	}
	for i, c := range cases {
		if c.arrives {
			nstest.Until(s, payload(i)+" arrives", func() bool { look(); return seen[payload(i)] })
		}
	}
	if seen[payload(0)] {
		t.Errorf("%s arrives", payload(0))
	}
}

// Source ports are random, unique and permanent.
func TestSourcePorts(t *testing.T) {
	s := newSide(t)
	var all []Session
	for i := range 8 {
		x := s.session(i+1, "10.9.0.1", "10.9.0."+strconv.Itoa(100+i))
		x.SourcePort = 0
		all = append(all, x)
	}
	s.put(slices.Clone(all)...)
	ports := map[uint16]bool{}
	low := 0
	for _, x := range all {
		port := sourcePort(t, s.e, x.Discriminator)
		if port < bfd.FirstSourcePort || ports[port] {
			t.Errorf("port %d", port)
		}
		if ports[port] = true; port < bfd.FirstSourcePort+1024 {
			low++
		}
	}
	if low > len(all)/2 {
		t.Errorf("%d of %d ports are the lowest", low, len(all))
	}
	s.put(slices.Clone(all)...)
	for _, x := range all {
		if port := sourcePort(t, s.e, x.Discriminator); !ports[port] {
			t.Errorf("then port %d", port)
		}
	}
}

// An engine from a weir version without the egress program gets it by an upgrade.
func TestUpgradeGuardsEgress(t *testing.T) {
	s := newSide(t)
	s.put(s.session(1, "10.9.0.1", "10.9.0.2"))
	s.stop()
	l, err := s.root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	name := linkLeave + strconv.Itoa(s.index)
	there := func() bool {
		t.Helper()
		o, err := l.Open(s.e.instance)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		names, err := o.Links()
		if err != nil {
			t.Fatal(err)
		}
		return slices.Contains(names, name)
	}
	if !there() {
		t.Fatal("no program at the egress")
	}
	if err := l.RemoveLink(s.e.instance, name); err != nil {
		t.Fatal(err)
	}
	if err := Upgrade(t.Context(), l, s.here, tick); err != nil || !there() {
		t.Errorf("%t, %v", there(), err)
	}
}
