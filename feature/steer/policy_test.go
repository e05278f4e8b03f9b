// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// chosen runs the program on a packet and returns the slot of the selected socket.
func (w *world) chosen(t testing.TB, prog *ebpf.Program, proto uint8, from, to netip.AddrPort) int {
	t.Helper()
	ctx := lookupOf(proto, from, to)
	out := ctx
	v, err := prog.Run(&ebpf.RunOptions{Context: ctx, ContextOut: &out})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) && kernelBefore(t, 5, 13) {
		t.Skip("need: kernel 5.13 for test runs of sk_lookup:", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if v != skPass {
		return -1
	}
	return w.slotOf[out.Cookie]
}

// withSlots returns a service with a member in every slot. slotOf maps their sockets to slots.
func withSlots(t *testing.T, o spec.Options) (*world, *ebpf.Program) {
	t.Helper()
	o.Engine = spec.EngineSkLookup // only this engine can run without packets
	w := newWorld(t, o, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	for slot := range o.Slots {
		w.member(slot, startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
	}
	w.apply()
	w.learnSlots()
	return w, w.attached(t)
}

func (w *world) learnSlots() {
	w.slotOf = map[uint64]int{}
	for _, s := range w.state().Slots {
		for _, sock := range s.Sockets {
			w.slotOf[sock.Cookie] = s.Slot
		}
	}
}

const udp, tcp = unix.IPPROTO_UDP, unix.IPPROTO_TCP

// TestFlowPolicy: the program and its Go counterpart agree for every packet.
func TestFlowPolicy(t *testing.T) {
	w, prog := withSlots(t, spec.Options{Slots: 3, By: spec.ByFlow, Weights: spec.Weights{1: 2}})
	s := w.state()
	to := netip.MustParseAddrPort("10.0.0.1:9991")
	got := map[int]int{}
	for i := range 300 {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i % 5), byte(i % 7)}), uint16(1024+i*211))
		for _, proto := range []uint8{udp, tcp} {
			want := int(s.Table[state.HashFlow(s.Seed, proto, from, to)&(spec.Buckets-1)])
			at := w.chosen(t, prog, proto, from, to)
			got[at]++
			if at != want || at != w.chosen(t, prog, proto, from, to) {
				t.Fatalf("protocol %d from %s: slot %d, the twin says %d", proto, from, at, want)
			}
		}
	}
	if got[1] < got[0] || got[1] < got[2] || got[0] == 0 || got[2] == 0 {
		t.Errorf("slots got %v, weights 1, 2, 1", got)
	}
	if _, err := s.Where(state.WhatIf{}, to.Addr()); err == nil || !strings.Contains(err.Error(), "weir explain") {
		t.Errorf("where: %v", err)
	}
}

// TestPacketPolicy: 4,096 packets visit every bucket once and all slots evenly.
func TestPacketPolicy(t *testing.T) {
	w, prog := withSlots(t, spec.Options{Slots: 4, By: spec.ByPacket, Weights: spec.Weights{3: 3}})
	from, to := netip.MustParseAddrPort("192.0.2.7:2055"), netip.MustParseAddrPort("10.0.0.1:9991")
	if kernelBefore(t, 5, 13) {
		t.Skip("need: kernel 5.13 for test runs of sk_lookup")
	}
	unlock := onOneCPU(t)
	defer unlock()
	got := map[int]int{}
	for range spec.Buckets {
		got[w.chosen(t, prog, udp, from, to)]++
	}
	for _, s := range w.state().Slots {
		if got[s.Slot] != s.Buckets {
			t.Errorf("slot %d got %d of %d packets, it has %d buckets", s.Slot, got[s.Slot], spec.Buckets, s.Buckets)
		}
	}
	got = map[int]int{}
	for range 60 {
		got[w.chosen(t, prog, udp, from, to)]++
	}
	for slot, want := range []int{10, 10, 10, 30} {
		if got[slot] < want-4 || got[slot] > want+4 {
			t.Errorf("of 60 packets slot %d got %d, want about %d", slot, got[slot], want)
		}
	}
	if _, err := w.state().Where(state.WhatIf{}, from.Addr()); err == nil {
		t.Error("where tells the place of a source by: packet")
	}
}

func TestCPUPolicy(t *testing.T) {
	w, prog := withSlots(t, spec.Options{Slots: 3, By: spec.ByCPU})
	if kernelBefore(t, 5, 13) {
		t.Skip("need: kernel 5.13 for test runs of sk_lookup")
	}
	unlock := onOneCPU(t)
	defer unlock()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	from, to := netip.MustParseAddrPort("192.0.2.7:2055"), netip.MustParseAddrPort("10.0.0.1:9991")
	for cpu := range 64 {
		if !set.IsSet(cpu) {
			continue
		}
		if got := w.chosen(t, prog, tcp, from, to); got != cpu%3 {
			t.Errorf("on CPU %d: slot %d, want %d", cpu, got, cpu%3)
		}
	}
	w.locked(func(l lock) error {
		if err := engine.Drain(l, slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 1}, nil); !errors.Is(err, record.ErrNoMove) {
			t.Errorf("draining a slot by: cpu: %v", err)
		}
		return nil
	})
}

// TestOnEmptyFollowsThePolicy checks the defaults of on_empty.
func TestOnEmptyFollowsThePolicy(t *testing.T) {
	for by, want := range map[spec.Policy]spec.OnEmpty{spec.BySource: spec.Reject, spec.ByDevice: spec.Reject, spec.ByFlow: spec.Next, spec.ByPacket: spec.Next, spec.ByCPU: spec.Next, spec.ByQUIC: spec.Next} {
		s := spec.Service{Options: spec.Options{By: by}}.WithDefaults()
		if s.OnEmpty != want {
			t.Errorf("by: %s: on_empty %s, want %s", by, s.OnEmpty, want)
		}
	}
}

// TestPoliciesOnTraffic sends traffic with every policy and an empty slot. Nothing is rejected.
func TestPoliciesOnTraffic(t *testing.T) { eachEngine(t, testPoliciesOnTraffic) }

func testPoliciesOnTraffic(t *testing.T) {
	for _, by := range []spec.Policy{spec.ByFlow, spec.ByPacket, spec.ByCPU} {
		t.Run(string(by), func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 3, By: by}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			a, b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(0, a)
			w.member(2, b)
			w.apply()
			got := map[string]int{}
			for range 30 {
				for _, proto := range slots.Protocols {
					got[ask(t, proto, sources(1)[0], loopback4)]++
				}
			}
			if got[fmt.Sprint(a.pid())]+got[fmt.Sprint(b.pid())] != 60 || by != spec.ByCPU && len(got) != 2 {
				t.Errorf("answers by %v of %d and %d", got, a.pid(), b.pid())
			}
		})
	}
}

// TestQUIC: connection ids of both formats lead to their slot. Initials and short packets go by their flow.
func TestQUIC(t *testing.T) {
	for _, q := range []spec.QUIC{{Format: spec.QUICNginx}, {Format: spec.QUICLB, ServerIDLength: 1}, {Format: spec.QUICLB, ServerIDLength: 3}} {
		t.Run(fmt.Sprintf("%s %d", q.Format, q.ServerIDLength), func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 3, By: spec.ByQUIC, QUIC: &q, Engine: spec.EngineAuto}, "udp 0.0.0.0:9991")
			var sinks []*sink
			for slot := range 3 {
				sinks = append(sinks, startSink(t, "udp4=0.0.0.0:9991"))
				w.member(slot, sinks[slot])
			}
			w.apply()
			s := w.state()
			if s.Engine != spec.EngineReuseport {
				t.Fatalf("engine auto chose %s", s.Engine)
			}
			for i := range 12 {
				c := dialUDP(t, sources(12)[i])
				flow := int(s.Table[state.HashFlow(s.Seed, udp, c.LocalAddr().(*net.UDPAddr).AddrPort(), loopback4)&(spec.Buckets-1)])
				for slot := range 3 {
					id := connectionID(q, s.Slots[slot].Sockets[0].Cookie, slot)
					for name, p := range map[string]struct {
						packet []byte
						want   int
					}{
						"short header": {append([]byte{0x40}, id...), slot},
						"handshake":    {append([]byte{0xe0, 0, 0, 0, 1, byte(len(id))}, id...), slot},
						"initial":      {append([]byte{0xc0, 0, 0, 0, 1, byte(len(id))}, id...), flow},
						"0-RTT":        {append([]byte{0xd0, 0, 0, 0, 1, byte(len(id))}, id...), flow},
						"cut short":    {append([]byte{0x40}, id[:3]...), flow},
						"no server":    {append([]byte{0x40}, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), flow},
					} {
						if got := exchange(t, c, p.packet); got != fmt.Sprint(sinks[p.want].pid()) {
							t.Errorf("%s for slot %d, flow of slot %d: answered by %s, want slot %d", name, slot, flow, got, p.want)
						}
					}
				}
			}
		})
	}
}

func connectionID(q spec.QUIC, cookie uint64, slot int) []byte {
	id := make([]byte, 12)
	if q.Format == spec.QUICNginx {
		for i := range 8 {
			id[i] = byte(cookie >> (56 - 8*i))
		}
		return id
	}
	id[0] = 0x0b // config 0, length
	id[q.ServerIDLength] = byte(slot)
	for i := q.ServerIDLength + 1; i < len(id); i++ {
		id[i] = byte(0xa0 + i)
	}
	return id
}

func dialUDP(t *testing.T, from netip.Addr) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp4", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(loopback4))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// exchange sends and returns the answer.
func exchange(t *testing.T, c *net.UDPConn, packet []byte) string {
	t.Helper()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(packet); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

// TestPolicyErrors checks rejected options and their messages.
func TestPolicyErrors(t *testing.T) {
	file := t.TempDir() + "/devices"
	if err := os.WriteFile(file, []byte("edge1 192.0.2.1\nedge1 192.0.2.2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for want, o := range map[string]spec.Options{
		"sees only addresses and ports":            {By: spec.ByQUIC, Engine: spec.EngineSkLookup},
		"quic needs by: quic":                      {QUIC: &spec.QUIC{Format: spec.QUICNginx}},
		"server_id_length needs format":            {By: spec.ByQUIC, QUIC: &spec.QUIC{Format: spec.QUICNginx, ServerIDLength: 2}},
		"want bytes, from 1 to 4":                  {By: spec.ByQUIC, QUIC: &spec.QUIC{Format: spec.QUICLB, ServerIDLength: 5}},
		"has no buckets":                           {By: spec.ByCPU, Weights: spec.Weights{0: 2}},
		"there are slots 0 to 1":                   {Weights: spec.Weights{2: 1}},
		"want a number from 0 to 1000":             {Weights: spec.Weights{1: -1}},
		"set at least one above 0":                 {Weights: spec.Weights{0: 0, 1: 0}},
		"devices needs by: device":                 {Devices: file},
		"needs a file":                             {By: spec.ByDevice},
		"/devices:2: edge1 is repeated, first in ": {By: spec.ByDevice, Devices: file},
		"no such file":                             {By: spec.ByDevice, Devices: "/nonexistent"},
		"not a regular file":                       {By: spec.ByDevice, Devices: "/dev"},
	} {
		o.Slots = 2
		w := worldOf(t, o)
		err := errors.Join(w.cfg.Validate()...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v; want it to say %q", o, err, want)
		}
	}
}

func TestRate(t *testing.T) {
	for text, want := range map[string]spec.Rate{"5/s": 5, "30/m": 0.5, "36/h": 0.01, "0": 0, "0/s": 0, "2.5/s": 2.5} {
		r, err := feature.ParseRate(text)
		if err != nil || r != want {
			t.Errorf("%s is %v, %v; want %v", text, float64(r), err, float64(want))
		}
		again, err := feature.ParseRate(r.String())
		if err != nil || again != r {
			t.Errorf("%s is printed as %s, which is %v, %v", text, r, again, err)
		}
	}
	for _, text := range []string{"", "5", "-1/s", "5/d", "x/s", "NaN/s", "1e9/s", "/s"} {
		if r, err := feature.ParseRate(text); err == nil {
			t.Errorf("%q is taken for %v", text, r)
		}
	}
}

func TestWeightsInYAML(t *testing.T) {
	var o spec.Options
	if err := strictyaml.Decode("f.yaml", []byte("weights: {0: 2, 3: 1}\nreset_rate: 30/m\n"), &o); err != nil || o.Weights.String() != "0: 2, 3: 1" || *o.ResetRate != 0.5 {
		t.Errorf("%+v, %v", o, err)
	}
	for text, want := range map[string]string{"weights: {x: 1}": `slot "x"`, "weights: {1: 1, 01: 2}": "two weights", "weights: [1]": "f.yaml:1", "reset_rate: 5": "like 5/s"} {
		if err := strictyaml.Decode("f.yaml", []byte(text), &o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want it to say %q", text, err, want)
		}
	}
}

// worldOf returns a configuration that is not applied.
func worldOf(t *testing.T, o spec.Options) *world {
	t.Helper()
	s := spec.Service{Spec: service.Spec{Name: "svc"}, Options: o}
	l, err := service.ParseListen("udp 0.0.0.0:9991")
	if err != nil {
		t.Fatal(err)
	}
	s.Listen = append(s.Listen, l)
	return &world{t: t, cfg: spec.Config{Services: []spec.Service{s}}}
}

// onOneCPU pins the test's thread to its current CPU.
func onOneCPU(t *testing.T) (back func()) {
	t.Helper()
	runtime.LockOSThread()
	var was unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		t.Fatal(err)
	}
	for cpu := range 1024 {
		if was.IsSet(cpu) {
			var one unix.CPUSet
			one.Set(cpu)
			if err := unix.SchedSetaffinity(0, &one); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	return func() {
		unix.SchedSetaffinity(0, &was)
		runtime.UnlockOSThread()
	}
}
