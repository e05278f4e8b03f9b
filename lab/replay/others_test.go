// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

// goflow2 is the path written by make.
const goflow2 = "../../bin/goflow2"

// others are collectors of other projects. They decode the same captures as nfacctd.
var others = []struct {
	program string
	need    map[string]string
	prepare func(e *lab.Env, namespace string, n int) (*peers.Collector, error)
}{
	{
		program: "goflow2", need: map[string]string{goflow2: "make bin/goflow2"},
		prepare: func(e *lab.Env, namespace string, n int) (*peers.Collector, error) {
			binary, err := filepath.Abs(goflow2)
			if err != nil {
				return nil, err
			}
			return peers.NewGoFlow2(e, binary, namespace, n, rig.Port)
		},
	},
	{
		program: "nfcapd", need: map[string]string{"nfcapd": "Debian package nfdump", "nfdump": "Debian package nfdump"},
		prepare: func(e *lab.Env, namespace string, n int) (*peers.Collector, error) {
			return peers.NewNfcapd(e, namespace, n, 7001+n)
		},
	},
}

// A generated router sends this number of messages at a time, and of records in each.
const messages, records = 40, 5

// Collectors outside weir's original scope. Routers with NetFlow and IPFIX over both families, real and
// generated, reach the one collector named by weir. One collector is killed, and only its routers are
// rejected. It returns, and every record is at the right collector.
func TestOtherCollectors(t *testing.T) {
	for _, other := range others {
		t.Run(other.program, func(t *testing.T) {
			b, e := openBench(t, other.need)
			b.copies = 4
			s := &rig.Service{Name: "flows", Listen: []string{fmt.Sprintf("udp :%d", rig.Port)}, Exact: true}
			for n := range 3 {
				c, err := other.prepare(e, b.world.Collectors.Name, n)
				check(t, err)
				s.Collectors = append(s.Collectors, c)
			}
			weir, err := rig.NewWeir(e, b.world.Collectors.Name, s)
			check(t, err)
			check(t, weir.Apply(t.Context()))
			_, err = weir.Serve()
			check(t, err)
			for _, c := range s.Collectors {
				check(t, c.Start())
			}
			check(t, s.Admitted(t.Context(), 60*time.Second))
			o := &otherRun{bench: b, service: s, sent: map[netip.Addr]int{}, got: map[netip.Addr]*seen{}}
			o.generated = b.senders(s, generated())
			if _, err := os.Stat(captures); err == nil {
				o.captured = b.senders(s, datagramsOnly(load(t, "netgauze/", "pmacct/", "telegraf/ipfix", "telegraf/issue", "telegraf/netflow")))
			} else {
				t.Log("no captures of real telemetry in", captures)
			}
			o.run()
		})
	}
}

// generated returns routers of each protocol and family. Their messages are created when sent.
func generated() []Device {
	var all []Device
	for _, family := range []string{"10.0.0.1", "2001:db8::1"} {
		for _, protocol := range []string{"IPFIX", "NetFlow 9"} {
			all = append(all, Device{Name: "generated " + protocol, Source: netip.MustParseAddr(family)})
		}
	}
	return all
}

// datagramsOnly removes the BMP streams.
func datagramsOnly(devices []Device) []Device {
	var out []Device
	for _, d := range devices {
		if d.Streams = nil; len(d.UDP) > 0 {
			out = append(out, d)
		}
	}
	return out
}

// otherRun is one service with three collectors of one kind.
type otherRun struct {
	*bench
	service             *rig.Service
	generated, captured []*sender
	round               int
	sent                map[netip.Addr]int // records of generated routers
	got                 map[netip.Addr]*seen
}

func (o *otherRun) run() {
	for _, s := range o.captured {
		o.datagrams(s, rig.Port)
	}
	o.send(-1)
	o.settle(5 * time.Second)
	o.judgeCaptured()
	o.counters(o.service, slices.Concat(o.captured, o.generated)...)

	const victim = 1
	c := o.service.Collectors[victim]
	check(o.t, c.Kill(syscall.SIGKILL))
	<-c.Done()
	o.holder(victim, 0)
	before := o.verdicts()
	rejected := o.send(victim)
	o.settle(2500 * time.Millisecond)
	for slot, v := range o.verdicts() {
		want := before[slot]
		if slot == victim {
			want.Rejected += uint64(rejected)
		} else {
			want.Steered += uint64(o.perSlot(slot) * messages)
		}
		if v != want {
			o.t.Errorf("slot %d while collector %d was dead: counters %+v, want %+v", slot, victim, v, want)
		}
	}
	if rejected == 0 {
		o.t.Errorf("no datagrams sent to dead collector %d", victim)
	}
	check(o.t, c.Start())
	check(o.t, o.service.Admitted(o.t.Context(), 60*time.Second))
	before = o.verdicts()
	o.send(-1)
	o.settle(2500 * time.Millisecond)
	for slot, v := range o.verdicts() {
		want := before[slot]
		want.Steered += uint64(o.perSlot(slot) * messages)
		if v != want {
			o.t.Errorf("slot %d after the return of collector %d: counters %+v, want %+v", slot, victim, v, want)
		}
	}
	o.t.Logf("%d generated and %d captured routers", len(o.generated), len(o.captured))
}

// perSlot returns the number of a slot's generated routers.
func (o *otherRun) perSlot(slot int) (n int) {
	for _, s := range o.generated {
		if s.slot == slot {
			n++
		}
	}
	return n
}

func (o *otherRun) verdicts() []rig.Verdicts {
	o.t.Helper()
	all, err := o.service.Status(o.t.Context())
	check(o.t, err)
	var out []rig.Verdicts
	for _, v := range all {
		out = append(out, v["udp"])
	}
	return out
}

// holder waits until a slot holds this process, 0 for none.
func (o *otherRun) holder(slot, pid int) {
	o.t.Helper()
	nstest.Eventually(o.t, func() error {
		got, err := o.service.Occupant(slot)
		check(o.t, err)
		if got == pid {
			return nil
		}
		return fmt.Errorf("slot %d is held by process %d, want %d", slot, got, pid)
	})
}

// send sends a round from every generated router, with slot dead rejecting. It returns the number of
// datagrams sent to this slot.
func (o *otherRun) send(dead int) (toDead int) {
	for i, s := range o.generated {
		d := routers.NewDevice(i, s.addr)
		conn, err := o.dialer.Dial("udp", s.addr, to(s.addr, rig.Port))
		check(o.t, err)
		s.UDP = nil
		for m := range messages {
			seq := uint32(o.round*messages + m)
			payload := d.NetFlow9(nil, seq, m == 0, records, 7, time.Now())
			if s.Name == "generated IPFIX" {
				payload = d.IPFIX(nil, seq*records, m == 0, records, 7, time.Now())
			}
			s.UDP = append(s.UDP, payload)
			_, err := conn.Write(payload)
			switch {
			case s.slot != dead:
				check(o.t, err)
				o.sent[s.addr] += records
			case err == nil: // an error is the answer to the previous datagram, and this one was not sent
				toDead++
			}
			pace(m)
		}
		conn.Close()
	}
	o.round++
	return toDead
}

// settle reads until every generated record is present and nothing new arrives for a while, and compares.
// nfcapd writes every two seconds.
func (o *otherRun) settle(while time.Duration) {
	o.t.Helper()
	quiet := time.Now()
	_ = nstest.Poll(2*time.Minute, func() error { // missing records are reported below
		if o.poll() {
			quiet = time.Now()
		}
		if o.missing() == 0 && time.Since(quiet) > while && alike(o.captured)(o.got) {
			return nil
		}
		return errors.New("not complete")
	})
	for _, s := range o.generated {
		v := o.got[s.addr]
		if v == nil {
			v = &seen{}
		}
		if v.flows != o.sent[s.addr] {
			o.t.Errorf("%s from %s of slot %d: %d records of %d", s.Name, s.addr, s.slot, v.flows, o.sent[s.addr])
		}
		for c := range v.at {
			if c != s.slot {
				o.t.Errorf("%s from %s belongs to slot %d and was seen by collector %d", s.Name, s.addr, s.slot, c)
			}
		}
	}
}

func (o *otherRun) missing() (n int) {
	for a, sent := range o.sent {
		if v := o.got[a]; v == nil || v.flows < sent {
			n++
		}
	}
	return n
}

// poll reads new output.
func (o *otherRun) poll() (news bool) {
	for _, c := range o.service.Collectors {
		check(o.t, c.Poll(func(r peers.Record) {
			if r.Kind != peers.Flows {
				o.t.Errorf("%s: %+v", c, r)
				return
			}
			news = true
			if o.got[r.Device] == nil {
				o.got[r.Device] = &seen{at: map[int]bool{}}
			}
			o.got[r.Device].at[c.Number] = true
			o.got[r.Device].flows += r.Count
		}))
	}
	return news
}

// judgeCaptured checks the captured routers: all copies equal, each at its collector.
func (o *otherRun) judgeCaptured() {
	all := map[netip.Addr]*seen{}
	for a, v := range o.got {
		all[a] = v
	}
	for _, s := range o.generated {
		delete(all, s.addr)
	}
	o.judge(o.captured, all)
}
