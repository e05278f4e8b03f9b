// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
)

// The peer's function accepts good probes and rejects others with a reason.
func TestFunction(t *testing.T) {
	newest := func(b *bench) []byte { return b.sign(b.frame(100, 0)) }
	changed := func(seq uint32, change func(*bpf.LivenessLivenessFrame)) func(*bench) []byte {
		return func(b *bench) []byte { f := b.frame(seq, 0); change(f); return b.sign(f) }
	}
	for _, c := range []struct {
		name  string
		data  func(b *bench) []byte
		want  string // counted reason; "": accepted
		heard uint32 // including one before
	}{
		{"the next one", changed(101, func(*bpf.LivenessLivenessFrame) {}), "", 2},
		{"one that was overtaken", changed(60, func(*bpf.LivenessLivenessFrame) {}), "", 2},
		{"after many lost ones", changed(100000, func(*bpf.LivenessLivenessFrame) {}), "", 2},
		{"the same again", newest, "duplicate", 1},
		{"one from before the window", changed(30, func(*bpf.LivenessLivenessFrame) {}), "stale", 1},
		{"an older life", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Life = network64(76) }), "", 1},
		{"a later life", changed(1, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Life = network64(78) }), "", 1},
		{"another key", func(b *bench) []byte { o := *b; o.key[0]++; return o.sign(b.frame(101, 0)) }, "forged", 1},
		{"no tag", func(b *bench) []byte { return raw(b.frame(101, 0)) }, "forged", 1},
		{"a changed byte", func(b *bench) []byte { d := b.sign(b.frame(101, 0)); d[len(d)-30] ^= 1; return d }, "forged", 1},
		{"another place to return to", func(b *bench) []byte { d := b.sign(b.frame(101, 0)); d[14+40+8+3] ^= 1; return d }, "forged", 1},
		{"an answer, reflected", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Kind = 1 }), "forged", 1},
		{"from two hops away", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Ip.HopLimit = 254 }), "far", 1},
		{"cut off", func(b *bench) []byte { d := b.sign(b.frame(101, 0)); return d[:len(d)-1] }, "malformed", 1},
		{"cut off within its header", func(b *bench) []byte { return b.sign(b.frame(101, 0))[:60] }, "malformed", 1},
		{"another version", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Version = 2 }), "malformed", 1},
		{"a longer list", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Srh.Hdrlen = 14 }), "malformed", 1},
		{"another length", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Ip.PayloadLen = network16(12) }), "malformed", 1},
		{"another TLV", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Type = 5 }), "malformed", 1},
		{"no session's", changed(101, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Session = network32(8) }), "unknown", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.run(bpf.LivenessProgLivenessEndRun, newest(b))
			if s := b.state(); s.Heard != 1 || s.PeerSeq != 100 {
				t.Fatalf("the first: %+v", b.counted())
			}
			before := b.state()
			b.run(bpf.LivenessProgLivenessEndRun, c.data(b))
			got := b.counted()
			s := b.state()
			if s.Heard != c.heard {
				t.Errorf("heard %d, want %d; %v", s.Heard, c.heard, got)
			}
			if c.want == "" && len(got) != 0 || c.want != "" && (len(got) != 1 || got[c.want] != 1) {
				t.Errorf("counted %v, want %q", got, c.want)
			}
			if c.want != "" { // nothing else changed
				s.Counts = before.Counts
				if *s != *before {
					t.Error("it changed something")
				}
			}
		})
	}
}

// The answer is signed and contains the number and the arrival time of probes.
func TestAnswer(t *testing.T) {
	b := newBench(t)
	b.at(5 * time.Second)
	probe := b.sign(b.frame(1, 0))
	ret, answer, err := b.c.Programs[bpf.LivenessProgLivenessEndRun].Test(probe)
	if err != nil || ret != 0 {
		t.Fatal(ret, err)
	}
	f := b.frame(1, 5*time.Second)
	f.Tlv.Kind, f.Tlv.Heard, f.Tlv.Flags = 1, network32(1), 1
	if want := b.sign(f); !bytes.Equal(answer, want) {
		t.Errorf("%x\nwant\n%x", answer, want)
	}
	if ret, _, err := b.c.Programs[bpf.LivenessProgLivenessEndRun].Test(probe); err != nil || ret == 0 {
		t.Errorf("a probe that is replayed is answered: %d, %v", ret, err)
	}
}

// A replayed incarnation is rejected while the current one is alive.
func TestOldLife(t *testing.T) {
	b := newBench(t)
	b.run(bpf.LivenessProgLivenessEndRun, b.sign(b.frame(1, 0)))
	b.at(10 * time.Millisecond)
	b.run(bpf.LivenessProgLivenessEndRun, b.sign(b.frame(2, time.Millisecond)))
	old := b.frame(3, 2*time.Millisecond)
	old.Tlv.Life = network64(76)
	b.run(bpf.LivenessProgLivenessEndRun, b.sign(old))
	if got, s := b.counted(), b.state(); got["stale"] != 1 || s.Heard != 2 || s.PeerLife != 77 {
		t.Errorf("%v, %+v", got, s)
	}
}

// The path is proved only by a new and recent acknowledgement of this host's clock.
func TestFresh(t *testing.T) {
	b := newBench(t)
	seq := uint32(0)
	probe := func(at, got time.Duration, fresh bool) {
		t.Helper()
		seq++
		b.at(at)
		b.run(bpf.LivenessProgLivenessEndRun, b.sign(b.frame(seq, got)))
		s := b.state()
		if s.LastSeen != uint64(start+at) {
			t.Errorf("a probe at %s was not seen", at)
		}
		if is := s.LastFresh == uint64(start+at); is != fresh {
			t.Errorf("a probe at %s that acknowledges %s: fresh is %t", at, got, is)
		}
	}
	const s = time.Second
	probe(1*s, 0, false)   // acknowledges nothing
	probe(2*s, 1*s, true)  // the first answer
	probe(3*s, 1*s, false) // again: the answer of 2 s was lost
	probe(4*s, 3*s, true)
	probe(5*s, 2*s, false) // an older one
	probe(6*s, 7*s, false) // in the future
	probe(6*s+1, 6*s, true)
	probe(20*s, 6*s+1, false) // too old
	probe(21*s, 20500*1e6, true)
}

// Good answers are consumed; foreign packets pass.
func TestReturn(t *testing.T) {
	const pass, taken = math.MaxUint32, 2 // TC_ACT_UNSPEC, TC_ACT_SHOT
	changed := func(seq uint32, change func(*bpf.LivenessLivenessFrame)) func(*bench) []byte {
		return func(b *bench) []byte { f := b.answer(seq); change(f); return b.sign(f) }
	}
	for _, c := range []struct {
		name    string
		data    func(b *bench) []byte
		verdict uint32
		want    string
		answers uint32
	}{
		{"the next one", changed(6, func(*bpf.LivenessLivenessFrame) {}), taken, "", 2},
		{"one that was overtaken", changed(4, func(*bpf.LivenessLivenessFrame) {}), taken, "", 2},
		{"the same again", changed(5, func(*bpf.LivenessLivenessFrame) {}), taken, "duplicate", 1},
		{"to what was never sent", changed(1000, func(*bpf.LivenessLivenessFrame) {}), taken, "stale", 1},
		{"of another life", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Life = network64(76) }), taken, "stale", 1},
		{"a probe, reflected", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Kind = 0 }), taken, "forged", 1},
		{"no tag", func(b *bench) []byte { return raw(b.answer(6)) }, taken, "forged", 1},
		{"from far away", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Ip.HopLimit = 253 }), taken, "far", 1},
		{"as if from here", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Ip.HopLimit = 255 }), taken, "far", 1},
		{"malformed", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Srh.SegmentsLeft = 1 }), taken, "malformed", 1},
		{"for another router", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Ip.Daddr.Bytes[15]++ }), pass, "", 1},
		{"of another session", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Tlv.Session = network32(8) }), pass, "", 1},
		{"of another length", func(b *bench) []byte { return append(b.sign(b.answer(6)), 0) }, pass, "", 1},
		{"UDP", changed(6, func(f *bpf.LivenessLivenessFrame) { f.Ip.Nexthdr = 17 }), pass, "", 1},
		{"IPv4", func(b *bench) []byte { d := b.sign(b.answer(6)); d[12], d[13] = 8, 0; return d }, pass, "", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			s := b.state()
			s.Seq = 10
			s.SentAt[5] = start
			if err := b.maps[pinStates].Put(uint32(0), s); err != nil {
				t.Fatal(err)
			}
			b.at(time.Millisecond)
			if v := b.run(bpf.LivenessProgLivenessReturn, b.sign(b.answer(5))); v != taken || b.state().Answers != 1 {
				t.Fatalf("the first: %d, %v", v, b.counted())
			}
			if s := b.state(); s.RttMin != uint64(time.Millisecond) {
				t.Errorf("%d ns", s.RttMin)
			}
			before := b.state()
			v := b.run(bpf.LivenessProgLivenessReturn, c.data(b))
			got, s := b.counted(), b.state()
			if v != c.verdict || s.Answers != c.answers {
				t.Errorf("%d, answers %d; want %d, %d; %v", v, s.Answers, c.verdict, c.answers, got)
			}
			if c.want == "" && len(got) != 0 || c.want != "" && (len(got) != 1 || got[c.want] != 1) {
				t.Errorf("counted %v, want %q", got, c.want)
			}
			if c.want != "" || c.verdict == pass {
				s.Counts = before.Counts
				if *s != *before {
					t.Error("it changed something")
				}
			}
		})
	}
}

// beat returns the loop's packet.
func beat() []byte {
	d := make([]byte, frameBytes)
	d[12], d[13] = 0x86, 0xdd
	binary.NativeEndian.PutUint32(d[14:], frameMagic)
	return d
}

// A lossy link goes down exactly after multiplier missing answers in a row, and as often as falseAlarms predicts.
func TestLoss(t *testing.T) {
	b := newBench(t)
	b.s.Interval = 4 * time.Millisecond
	b.s.Grace = time.Millisecond
	b.put()
	const loss, seconds = 0.12, 40
	draw := rand.New(rand.NewPCG(1, 2))
	sent, missing, runs := uint32(0), 0, 0
	for i := time.Duration(1); i <= seconds*1000; i++ {
		b.at(i * time.Millisecond)
		b.run(bpf.LivenessProgLivenessTick, beat())
		s := b.state()
		if s.Seq == sent {
			continue
		}
		sent = s.Seq
		if out, back := draw.Float64(), draw.Float64(); sent > 10 && min(out, back) < loss {
			if missing++; missing == b.s.Multiplier {
				runs++
			}
			continue
		}
		missing = 0
		b.run(bpf.LivenessProgLivenessReturn, b.sign(b.answer(sent)))
	}
	s := b.state()
	if int(s.Sender.Downs) < runs-1 || int(s.Sender.Downs) > runs || runs < 20 {
		t.Errorf("%d downs, want %d", s.Sender.Downs, runs)
	}
	want := falseAlarms(loss, b.s.Interval, b.s.Multiplier) * seconds
	if math.Abs(float64(runs)-want) > 4*math.Sqrt(want) {
		t.Errorf("%d false alarms, falseAlarms expects %.0f", runs, want)
	}
}

// Flaps lengthen the time before up, to the configured maximum. Stalls of this host delay a verdict for a limited
// time.
func TestDampening(t *testing.T) {
	b := newBench(t)
	b.s.StableFor, b.s.StableMax = 100*time.Millisecond, 350*time.Millisecond
	b.put()
	i := time.Duration(0)
	run := func(answers bool, until func(*bpf.LivenessLivenessState) bool) time.Duration {
		t.Helper()
		for from := i; ; i++ {
			b.at(i * 2500 * time.Microsecond)
			b.run(bpf.LivenessProgLivenessTick, beat())
			s := b.state()
			if until(s) {
				return (i - from) * 2500 * time.Microsecond
			}
			if answers && s.Seq != s.Answered {
				b.run(bpf.LivenessProgLivenessReturn, b.sign(b.answer(s.Seq)))
			}
			if i-from > 10000 {
				t.Fatalf("never: %+v", s)
			}
		}
	}
	up := func(s *bpf.LivenessLivenessState) bool { return s.Sender.Phase == 1 }
	down := func(s *bpf.LivenessLivenessState) bool { return s.Sender.Phase == 2 }
	for n, want := range []time.Duration{100, 100, 200, 350, 350} {
		want *= time.Millisecond
		took := run(true, up)
		if took < want || took > want+50*time.Millisecond {
			t.Errorf("up for the %d. time after %s, want %s", n+1, took, want)
		}
		run(true, func(*bpf.LivenessLivenessState) bool { return i%40 == 0 })
		if took := run(false, down); took < 20*time.Millisecond || took > 40*time.Millisecond {
			t.Errorf("down after %s", took)
		}
	}
}

// A stalled host does not blame the link, for a limited time.
func TestStall(t *testing.T) {
	b := newBench(t)
	at := time.Duration(0)
	step := func(d time.Duration, answer bool) *bpf.LivenessLivenessState {
		at += d
		b.at(at)
		b.run(bpf.LivenessProgLivenessTick, beat())
		s := b.state()
		if answer && s.Seq != s.Answered {
			b.run(bpf.LivenessProgLivenessReturn, b.sign(b.answer(s.Seq)))
		}
		return b.state()
	}
	const tick = 2500 * time.Microsecond
	for range 100 {
		step(tick, true)
	}
	if s := b.state(); s.Sender.Phase != 1 {
		t.Fatalf("%+v", s.Sender)
	}
	// Two probes are unanswered, then a third when the host stalls. Their answers wait in its queue.
	for s := b.state(); s.Seq-s.Answered < 3; s = step(tick, false) {
	}
	if s := step(400*time.Millisecond, false); s.Sender.Phase != 1 {
		t.Errorf("down at the first tick after a stall: %+v", s.Sender)
	}
	s := b.state()
	b.run(bpf.LivenessProgLivenessReturn, b.sign(b.answer(s.Seq)))
	for range 8 {
		s = step(tick, true)
	}
	if s.Sender.Phase != 1 || s.Sender.Granted == 0 {
		t.Errorf("%+v", s.Sender)
	}
	// A host that stalls repeatedly, with a dead link.
	from := at
	for s.Sender.Phase == 1 {
		s = step(8*time.Millisecond, false)
		if at-from > 2*time.Second {
			t.Fatalf("stalls put the verdict off for ever: %+v", s.Sender)
		}
	}
	if took := at - from; took < 300*time.Millisecond || took > 700*time.Millisecond {
		t.Errorf("put off for %s", took)
	}
}

// A farewell needs a new acknowledgement. A recorded one has none.
func TestRecordedFarewell(t *testing.T) {
	b := newBench(t)
	b.run(bpf.LivenessProgLivenessEndRun, b.sign(b.frame(1, 0)))
	b.at(time.Second)
	old := b.frame(2, 0)
	old.Tlv.Flags = 2
	b.run(bpf.LivenessProgLivenessEndRun, b.sign(old))
	if s := b.state(); s.Heard != 2 || s.Closed != 0 {
		t.Errorf("closed at %d, heard %d", s.Closed, s.Heard)
	}
	fresh := b.frame(3, time.Millisecond)
	fresh.Tlv.Flags = 2
	b.run(bpf.LivenessProgLivenessEndRun, b.sign(fresh))
	if s := b.state(); s.Closed != uint64(start+time.Second) {
		t.Errorf("closed at %d", s.Closed)
	}
}

// falseAlarms returns the mean rate of false alarms, per second, for independent random loss in each direction. It is
// the rate of multiplier missing answers in a row. A burst longer than multiplier intervals is an outage, not a false
// alarm.
func falseAlarms(loss float64, interval time.Duration, multiplier int) float64 {
	missing := 1 - (1-loss)*(1-loss)
	return math.Pow(missing, float64(multiplier)) * (1 - missing) / interval.Seconds()
}
