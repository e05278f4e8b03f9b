// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/kernel/kerneltest"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// skLookup is struct bpf_sk_lookup of the kernel's UAPI in the form of PROG_TEST_RUN: addresses in network order, the
// local port in host order.
type skLookup struct {
	Cookie     uint64
	Family     uint32
	Protocol   uint32
	RemoteIP4  [4]byte
	RemoteIP6  [16]byte
	RemotePort [2]byte
	_          [2]byte
	LocalIP4   [4]byte
	LocalIP6   [16]byte
	LocalPort  uint32
	Ifindex    uint32
	_          [4]byte
}

func lookupOf(proto uint8, from, to netip.AddrPort) skLookup {
	l := skLookup{Protocol: uint32(proto), LocalPort: uint32(to.Port())}
	binary.BigEndian.PutUint16(l.RemotePort[:], from.Port())
	if from.Addr().Is4() {
		l.Family, l.RemoteIP4, l.LocalIP4 = unix.AF_INET, from.Addr().As4(), to.Addr().As4()
	} else {
		l.Family, l.RemoteIP6, l.LocalIP6 = unix.AF_INET6, from.Addr().As16(), to.Addr().As16()
	}
	return l
}

const (
	skDrop = 0 // SK_DROP: answered with a reset or an ICMP error
	skPass = 1
)

// attached returns the world's attached program, for test runs.
func (w *world) attached(t testing.TB) *ebpf.Program {
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var prog *ebpf.Program
	w.locked(func(l *kernel.WriteLock) error {
		o, err := l.Open(record.EngineInstance(record.Scope(ns), spec.EngineSkLookup), "slots")
		if err != nil {
			return err
		}
		defer o.Close()
		ln, err := o.Link("lookup")
		if err != nil {
			return err
		}
		defer ln.Close()
		info, err := ln.Info()
		if err != nil {
			return err
		}
		prog, err = ebpf.NewProgramFromID(info.Program)
		return err
	})
	t.Cleanup(func() { prog.Close() })
	return prog
}

// TestProgram runs the program on packets in different states, without traffic.
func TestProgram(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp4 0.0.0.0:9991", "udp6 [2001:db8::]/32:9992")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991", "udp6=[::]:9992")
	w.member(0, a, "udp 0.0.0.0:9991", "tcp4 0.0.0.0:9991", "udp6 [::]:9992")
	w.apply()
	prog := w.attached(t)
	const udp, tcp = unix.IPPROTO_UDP, unix.IPPROTO_TCP
	cases := []struct {
		name     string
		proto    uint8
		from, to string
		verdict  uint32
		assigned bool
		empty    uint32 // verdict after the member's exit
	}{
		{"udp", udp, "192.0.2.7:2055", "10.0.0.1:9991", skPass, true, skDrop},
		{"tcp", tcp, "192.0.2.7:2055", "10.0.0.1:9991", skPass, true, skDrop},
		{"another port", udp, "192.0.2.7:2055", "10.0.0.1:9990", skPass, false, skPass},
		{"the same port, IPv6, not listened to", tcp, "[2001:db8::7]:2055", "[2001:db8::1]:9991", skPass, false, skPass},
		{"within the prefix", udp, "[fd00::7]:2055", "[2001:db8::1]:9992", skPass, true, skDrop},
		{"outside the prefix", udp, "[fd00::7]:2055", "[2001:db9::1]:9992", skPass, false, skPass},
		{"the prefix's port over TCP", tcp, "[fd00::7]:2055", "[2001:db8::1]:9992", skPass, false, skPass},
	}
	run := func(ctx skLookup) (verdict uint32, assigned bool) {
		t.Helper()
		out := ctx
		v, err := prog.Run(&ebpf.RunOptions{Context: ctx, ContextOut: &out})
		if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) && kernelBefore(t, 5, 13) {
			t.Skip("need: kernel 5.13 for test runs of sk_lookup:", err)
		} else if err != nil {
			t.Fatal(err)
		}
		return v, out.Cookie != 0
	}
	for _, c := range cases {
		from, to := netip.MustParseAddrPort(c.from), netip.MustParseAddrPort(c.to)
		if v, assigned := run(lookupOf(c.proto, from, to)); v != c.verdict || assigned != c.assigned {
			t.Errorf("%s: verdict %d, assigned %v; want %d, %v", c.name, v, assigned, c.verdict, c.assigned)
		}
	}
	a.kill()
	for _, c := range cases {
		from, to := netip.MustParseAddrPort(c.from), netip.MustParseAddrPort(c.to)
		if v, assigned := run(lookupOf(c.proto, from, to)); v != c.empty || assigned {
			t.Errorf("%s, no member: verdict %d, assigned %v; want %d", c.name, v, assigned, c.empty)
		}
	}
}

func kernelBefore(t testing.TB, major, minor int) bool {
	t.Helper()
	have, err := kerneltest.Release()
	if err != nil {
		t.Fatal(err)
	}
	return have[0] < major || have[0] == major && have[1] < minor
}

func BenchmarkLookup(b *testing.B) { benchmarkLookup(b, nil) }

// BenchmarkLookupGenerations is the benchmark for a service with known UDP peers.
func BenchmarkLookupGenerations(b *testing.B) { benchmarkLookup(b, &spec.Generations{}) }

func benchmarkLookup(b *testing.B, generations *spec.Generations) {
	w := newWorld(b, spec.Options{Slots: 4, Generations: generations}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	for i := range 4 {
		w.member(i, startSink(b, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
	}
	w.apply()
	prog := w.attached(b)
	for name, to := range map[string]string{"steered": "10.0.0.1:9991", "not ours": "10.0.0.1:53"} {
		b.Run(name, func(b *testing.B) {
			ctx := lookupOf(unix.IPPROTO_UDP, netip.MustParseAddrPort("192.0.2.7:2055"), netip.MustParseAddrPort(to))
			if _, err := prog.Run(&ebpf.RunOptions{Context: ctx, Repeat: uint32(b.N)}); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkReuseport is the benchmark for the other engine. Only packets run it, so its time is the kernel's own
// measurement, including two clock readings.
func BenchmarkReuseport(b *testing.B) {
	w := newWorld(b, spec.Options{Slots: 4, Engine: spec.EngineReuseport}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	for i := range 4 {
		w.member(i, startSink(b, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
	}
	w.apply()
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		b.Skip("need: kernel 5.8 for statistics:", err)
	}
	defer stats.Close()
	prog := w.groupProgram(b, unix.IPPROTO_UDP)
	var conns []net.Conn
	for _, from := range sources(64) {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(loopback4))
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	before, err := prog.Stats()
	if err != nil {
		b.Fatal(err)
	}
	for i := range b.N {
		if _, err := conns[i%len(conns)].Write([]byte("x")); err != nil {
			b.Fatal(err)
		}
	}
	after, err := prog.Stats()
	if err != nil {
		b.Fatal(err)
	}
	if n := after.RunCount - before.RunCount; n < uint64(b.N) {
		b.Fatalf("%d of %d packets met the program", n, b.N)
	} else {
		b.ReportMetric(float64((after.Runtime-before.Runtime).Nanoseconds())/float64(n), "ns/packet")
	}
}

// groupProgram returns the program of a protocol's group.
func (w *world) groupProgram(t testing.TB, proto uint8) (prog *ebpf.Program) {
	t.Helper()
	w.locked(func(l *kernel.WriteLock) error {
		o, err := l.Open(record.EngineInstance(w.state().Scope(), spec.EngineReuseport), "groups")
		if err != nil {
			return err
		}
		defer o.Close()
		groups, err := engine.Entries[engine.GroupKey, engine.GroupValue](o.Maps["groups"])
		if err != nil {
			return err
		}
		for k, v := range groups {
			if k.Proto == proto {
				prog, err = ebpf.NewProgramFromID(ebpf.ProgramID(v.Program))
			}
		}
		return err
	})
	t.Cleanup(func() { prog.Close() })
	return prog
}
