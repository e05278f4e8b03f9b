// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// captures is a directory beside the repository, on the authors' machines. Its files are too large for the
// repository and belong to others.
const captures = "../../../shared/data/captures"

// copies is the default number of routers for each captured one.
const copies = 12

func TestMain(m *testing.M) {
	lab.Enter()
	nstest.Main(m)
}

// bench is a host with nfacctd and sfacctd under weir.
type bench struct {
	t              *testing.T
	copies         int
	world          *rig.World
	netflow, sflow *rig.Service
	dialer         *routers.Dialer
	fillers        map[netip.Addr]bool       // sources of warm
	before         []map[string]rig.Verdicts // counters after warm
	next           map[bool]netip.Addr       // next free source address, of IPv4 (true) and IPv6
}

func newBench(t *testing.T) *bench {
	b, e := openBench(t, map[string]string{"nfacctd": "Debian package pmacct", "sfacctd": "Debian package pmacct"})
	b.startCollectors(e)
	b.warm()
	return b
}

// openBench creates the network and a weir, for installed peers.
func openBench(t *testing.T, peers map[string]string) (*bench, *lab.Env) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	for program, from := range peers {
		if _, err := lab.Find(program); err != nil {
			t.Skipf("need: tool %s (%s)", program, from)
		}
	}
	weir := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "-C", "../..", "build", "-o", weir, "./cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("build weir: %v\n%s", err, out)
	}
	t.Setenv("WEIR", weir)
	e, err := lab.NewEnv(lab.Smoke, 42)
	check(t, err)
	t.Cleanup(func() {
		e.Close()
		if left := e.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	b := &bench{t: t, copies: copies, fillers: map[netip.Addr]bool{}, next: map[bool]netip.Addr{true: rig.Devices4.Addr().Next(), false: rig.Devices6.Addr().Next()}}
	b.world, err = rig.NewWorld(e, 0)
	check(t, err)
	check(t, b.world.Reachable(t.Context(), 60*time.Second))
	b.dialer = routers.NewDialer(b.world.Routers.Handle)
	t.Cleanup(func() { b.dialer.Close() })
	return b, e
}

const sflowPort = 6343

func (b *bench) startCollectors(e *lab.Env) {
	ctx := b.t.Context()
	b.netflow = &rig.Service{Name: "telemetry", Listen: []string{fmt.Sprintf("udp :%d", rig.Port), fmt.Sprintf("tcp :%d", rig.Port)}, Exact: true}
	b.sflow = &rig.Service{Name: "sflow", Listen: []string{fmt.Sprintf("udp :%d", sflowPort)}, Exact: true}
	for n := range 3 {
		c, err := peers.NewCollector(e, b.world.Collectors.Name, n, rig.Port, 10*copies)
		check(b.t, err)
		b.netflow.Collectors = append(b.netflow.Collectors, c)
	}
	for n := range 2 {
		c, err := peers.NewSFlowCollector(e, b.world.Collectors.Name, n, sflowPort)
		check(b.t, err)
		b.sflow.Collectors = append(b.sflow.Collectors, c)
	}
	weir, err := rig.NewWeir(e, b.world.Collectors.Name, b.netflow, b.sflow)
	check(b.t, err)
	check(b.t, weir.Apply(ctx)) // before the collectors: they are detected at their start
	_, err = weir.Serve()
	check(b.t, err)
	for _, c := range slices.Concat(b.netflow.Collectors, b.sflow.Collectors) {
		check(b.t, c.Start())
	}
	check(b.t, b.netflow.Admitted(ctx, 60*time.Second))
	check(b.t, b.sflow.Admitted(ctx, 60*time.Second))
}

// sender is one router repeating a device's traffic.
type sender struct {
	Device
	addr netip.Addr
	slot int
}

// senders creates the copies of every device, each with its own address of the device's family, and asks
// weir for their slots.
func (b *bench) senders(s *rig.Service, devices []Device) []*sender {
	var all []*sender
	var addrs []netip.Addr
	for _, d := range devices {
		v4 := !d.Source.Is6()
		for range b.copies {
			all = append(all, &sender{Device: d, addr: b.next[v4]})
			addrs = append(addrs, b.next[v4])
			b.next[v4] = b.next[v4].Next()
		}
	}
	slots, err := s.Where(b.t.Context(), addrs)
	check(b.t, err)
	for _, s := range all {
		s.slot = slots[s.addr]
	}
	return all
}

func to(a netip.Addr, port uint16) netip.AddrPort {
	if a.Is4() {
		return netip.AddrPortFrom(rig.Service4, port)
	}
	return netip.AddrPortFrom(rig.Service6, port)
}

// streams writes every TCP stream on a separate connection. The connections stay open until the test ends.
func (b *bench) streams(s *sender) {
	for _, stream := range s.Streams {
		conn, err := b.dialer.Dial("tcp", s.addr, to(s.addr, rig.Port))
		check(b.t, err)
		b.t.Cleanup(func() { conn.Close() })
		check(b.t, conn.SetWriteDeadline(time.Now().Add(60*time.Second)))
		// A collector may end the session at unknown content.
		if _, err := conn.Write(stream); err != nil {
			b.t.Logf("%s: %v", s.Name, err)
		}
	}
}

// datagrams sends every payload. None may be rejected.
func (b *bench) datagrams(s *sender, port uint16) {
	if err := b.send(s, port); err != nil {
		b.t.Errorf("%s from %s was rejected: %v", s.Name, s.addr, err)
	}
}

// send sends every payload, and returns the error of a rejected one.
func (b *bench) send(s *sender, port uint16) error {
	conn, err := b.dialer.Dial("udp", s.addr, to(s.addr, port))
	check(b.t, err)
	defer conn.Close()
	for i, p := range s.UDP {
		if _, err := conn.Write(p); err != nil {
			return err
		}
		pace(i)
	}
	var one [1]byte
	check(b.t, conn.SetReadDeadline(time.Now().Add(time.Millisecond)))
	if _, err := conn.Read(one[:]); err != nil && !isTimeout(err) {
		return err
	}
	return nil
}

// pace slows the sender of datagrams: the size of a collector's buffer is not tested here.
func pace(sent int) {
	if sent%10 == 9 {
		time.Sleep(time.Millisecond)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// warm sends records from one extra router for each slot, until every collector has written some. nfacctd's
// plugin takes a while to find its core, and rarely never finds it; then the collector is restarted.
func (b *bench) warm() {
	fillers := map[int]*sender{}
	for len(fillers) < len(b.netflow.Collectors) {
		for _, s := range b.senders(b.netflow, []Device{{Name: "filler"}}) {
			fillers[s.slot] = s
			b.fillers[s.addr] = true
		}
	}
	for _, c := range b.netflow.Collectors {
		for try := 1; !b.writes(c, fillers[c.Number]); try++ {
			if try == 3 {
				b.t.Fatalf("%s writes no flows; see its log in %s", c, c.Dir())
			}
			check(b.t, c.Kill(syscall.SIGKILL))
			<-c.Done()
			check(b.t, c.Start())
			check(b.t, b.netflow.Admitted(b.t.Context(), 60*time.Second))
		}
	}
	var err error
	b.before, err = b.netflow.Status(b.t.Context())
	check(b.t, err)
}

// writes sends records of one router to its collector and reports whether it writes them. nfacctd may crash
// during its start. Rejections by then are permitted, unless it is still the slot's member.
func (b *bench) writes(c *peers.Collector, filler *sender) bool {
	d := routers.NewDevice(0, filler.addr)
	for n := range uint32(200) {
		err := b.send(&sender{Device: Device{Name: "filler", UDP: [][]byte{d.IPFIX(nil, n, true, 1, 0, time.Now())}}, addr: filler.addr}, rig.Port)
		if err != nil {
			select { // the rejecting side may know the end of a collector before we do
			case <-c.Done():
			case <-time.After(5 * time.Second):
			}
		}
		if err != nil && c.Running() {
			holder, herr := b.netflow.Occupant(c.Number)
			b.t.Errorf("%s is running and in its slot: %v (%v), and its router is rejected: %v", c, holder == c.PID(), herr, err)
		}
		if !c.Running() {
			b.t.Logf("%s ended while it started: %v", c, c.Err())
			return false
		}
		heard := false
		_ = nstest.Poll(100*time.Millisecond, func() error { // else the next datagram
			check(b.t, c.Poll(func(r peers.Record) { heard = heard || r.Kind == peers.Flows }))
			if !heard {
				return errors.New("no output")
			}
			return nil
		})
		if heard {
			return true
		}
	}
	return false
}

// seen is the collectors' output about one source.
type seen struct {
	at    map[int]bool // collectors with output about it
	flows int          // packets in flow records
	bmp   int          // BMP messages
}

// read collects the collectors' output until it is complete and nothing new arrives for a while. On a busy
// machine collectors pause for longer than this while they process their input.
func (b *bench) read(s *rig.Service, complete func(map[netip.Addr]*seen) bool) map[netip.Addr]*seen {
	all := map[netip.Addr]*seen{}
	quiet := time.Now()
	_ = nstest.Poll(2*time.Minute, func() error { // the caller checks for missing records
		if time.Since(quiet) > 4*time.Second && complete(all) {
			return nil
		}
		for _, c := range s.Collectors {
			check(b.t, c.Poll(func(r peers.Record) {
				if r.Kind == peers.Odd || r.Kind == peers.Gap || b.fillers[r.Device] {
					return // captures hold much unknown to a collector
				}
				quiet = time.Now()
				if all[r.Device] == nil {
					all[r.Device] = &seen{at: map[int]bool{}}
				}
				v := all[r.Device]
				v.at[c.Number] = true
				switch r.Kind {
				case peers.Flows:
					v.flows += r.Count
				case peers.Route, peers.PeerUp, peers.Other:
					v.bmp++
				}
			}))
		}
		return errors.New("not complete")
	})
	for _, c := range s.Collectors {
		if !c.Running() {
			b.t.Errorf("%s ended: %v", c, c.Err())
		}
	}
	return all
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// counters checks weir's counters against the packets sent to each slot, with no rejections. This holds for
// every payload, including ones unknown to collectors.
func (b *bench) counters(s *rig.Service, senders ...*sender) {
	want := make([]map[string]uint64, len(s.Collectors))
	for i := range want {
		want[i] = map[string]uint64{}
	}
	for _, s := range senders {
		want[s.slot]["udp"] += uint64(len(s.UDP))
		want[s.slot]["tcp"] += uint64(len(s.Streams))
	}
	got, err := s.Status(context.Background())
	check(b.t, err)
	for slot := range got {
		for _, p := range []string{"udp", "tcp"} {
			v := got[slot][p]
			if s == b.netflow { // rejections during a restart of a collector are permitted
				was := b.before[slot][p]
				v.Steered, v.Rejected, v.Failed = v.Steered-was.Steered, v.Rejected-was.Rejected, v.Failed-was.Failed
			}
			if v.Steered != want[slot][p] || v.Lost() != 0 || v.Guests != 0 {
				b.t.Errorf("%s, slot %d, %s: %d sent, counters %+v", s.Name, slot, p, want[slot][p], v)
			}
		}
	}
}

// load returns the devices with one of the name prefixes.
func load(t *testing.T, prefixes ...string) []Device {
	t.Helper()
	all, err := Load(captures)
	check(t, err)
	return slices.DeleteFunc(all, func(d Device) bool {
		return !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(d.Name, p) })
	})
}
