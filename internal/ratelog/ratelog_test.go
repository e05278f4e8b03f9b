// SPDX-License-Identifier: Apache-2.0

package ratelog

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// output is read after due timers have written.
type output struct{ nstest.Log }

func (o *output) String() string {
	synctest.Wait()
	return o.Log.String()
}

// end returns the last 200 bytes.
func (o *output) end() string {
	s := o.String()
	return s[max(len(s)-200, 0):]
}

func countLines(o *output, containing ...string) (n int) {
	for line := range strings.Lines(o.String()) {
		all := true
		for _, c := range containing {
			all = all && strings.Contains(line, c)
		}
		if all {
			n++
		}
	}
	return n
}

// TestFloodOfOneUser checks that one user's flood is limited and counted, and lines about others
// remain.
func TestFloodOfOneUser(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out output
		log := Limit(slog.New(slog.NewTextHandler(&out, nil)))
		for i := range 36_000 {
			log.Warn("refused", "service", fmt.Sprint("s", i), "slot", i, "pid", 1, "uid", 65534, "reason", "it is no member")
		}
		for uid := range 500 {
			log.Warn("refused", "uid", uid)
		}
		log.With("a", 1).Warn("other", "uid", 65534)
		if n := countLines(&out, "uid=65534"); n != partyBurst+1 {
			t.Errorf("%d lines of one user, want %d of one message and 1 of another", n, partyBurst)
		}
		if n := countLines(&out, "msg=refused"); n != partyBurst+500 {
			t.Errorf("%d lines of all users, want %d", n, partyBurst+500)
		}
		time.Sleep(2 * time.Second)
		log.Warn("refused", "uid", 65534)
		if !strings.Contains(out.String(), fmt.Sprintf("suppressed=%d", 36_000-partyBurst)) {
			t.Errorf("the next line does not say how many are missing: %s", out.end())
		}
		log.Warn("refused", "uid", 65534)
		log.Warn("refused", "uid", 65534)
		time.Sleep(tellAfter)
		if n := countLines(&out, "log lines suppressed", "line=refused", "suppressed=1"); n != 1 {
			t.Errorf("the uncounted rest is logged %d times:\n%s", n, out.end())
		}
	})
}

// TestRepeats checks that a line repeated each second is logged each minute with its suppressed
// count. Other lines about the same party are logged at once, and so is the end of the repetition.
func TestRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out output
		log := Limit(slog.New(slog.NewTextHandler(&out, nil)))
		const seconds = 600
		for range seconds {
			log.Warn("an agent is refused", "name", "s1", "err", "it is none of the backends")
			log.Info("agent ended", "feature", "lb")
			log.With("part", 1).Info("agent ended", "feature", "lb")
			time.Sleep(time.Second)
		}
		for _, text := range []string{"name=s1", `ended" feature=lb`, "part=1"} {
			if n := countLines(&out, text); n < maxRepeats+seconds/60-2 || n > maxRepeats+seconds/60 {
				t.Errorf("%d lines with %s in %d s", n, text, seconds)
			}
		}
		if n := countLines(&out, "name=s1", "suppressed=59"); n < seconds/60-2 {
			t.Errorf("%d lines tell of 59 others", n)
		}
		if n := countLines(&out, "log lines suppressed"); n > 0 {
			t.Errorf("%d lines tell of lines only", n)
		}
		log.Warn("an agent is refused", "name", "s1", "err", "its certificate has expired")
		if n := countLines(&out, "expired"); n != 1 {
			t.Errorf("%d lines of another kind, want 1", n)
		}
		time.Sleep(2 * repeatEvery)
		if n := countLines(&out, "log lines suppressed", `line="an agent is refused"`); n > 1 {
			t.Errorf("the end is logged %d times", n)
		}
		log.Warn("an agent is refused", "name", "s1", "err", "it is none of the backends")
		log.Warn("an agent is refused", "name", "s1", "err", "it is none of the backends")
		if n := countLines(&out, "none of the backends"); n < maxRepeats+2+seconds/60-2 {
			t.Errorf("%d lines: a returning one is not logged", n)
		}
	})
}

// TestLatestOfAFlap checks that the latest state of a flapping link is the last line in the log,
// after any number of repetitions.
func TestLatestOfAFlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, every := range []time.Duration{time.Second, 3 * time.Second, 12 * time.Second} {
			for changes := 180; changes <= 220; changes++ {
				var out output
				log := Limit(slog.New(slog.NewTextHandler(&out, nil)))
				words := []string{"packets are dropped", "packets have a way again"}
				for i := range changes {
					log.Warn(words[i%2], "name", "a")
					time.Sleep(every)
				}
				log.Info("something else", "name", "a")
				time.Sleep(pause + 2*tellAfter)
				var lines []string
				for line := range strings.Lines(out.String()) {
					if strings.Contains(line, "msg=\"packets") {
						lines = append(lines, line)
					}
				}
				if last := lines[len(lines)-1]; !strings.Contains(last, words[(changes-1)%2]) {
					t.Errorf("%d changes, every %s: the last of %d lines is %q", changes, every, len(lines), last)
				}
				if every < pause/2 && len(lines) > changes/2 {
					t.Errorf("%d changes, every %s: %d lines", changes, every, len(lines))
				}
			}
		}
	})
}

// TestPausesOfManyParties checks that lines logged after a pause obey the limits, too.
func TestPausesOfManyParties(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out output
		log := Limit(slog.New(slog.NewTextHandler(&out, nil)))
		const parties = 600
		flood := func(from, to int) {
			for uid := from; uid < to; uid++ {
				log.Warn("refused", "uid", uid)
			}
		}
		for range maxRepeats {
			flood(0, parties)
			time.Sleep(repeatEvery - time.Second)
		}
		flood(0, parties)      // suppressed
		for range partyBurst { // spends all tokens
			flood(parties, maxParties)
		}
		before := countLines(&out, "msg=refused")
		const wait = pause + 2*tellAfter
		time.Sleep(wait)
		if n := countLines(&out, "msg=refused") - before; n > messageRate*int(wait/time.Second) {
			t.Errorf("%d lines in %s after a pause", n, wait)
		}
		time.Sleep(2 * parties / messageRate * time.Second)
		if n := countLines(&out, "msg=refused") - before; n < parties {
			t.Errorf("%d lines of %d are logged after a pause", n, parties)
		}
	})
}

// TestFloodOfManyParties checks that many parties are limited together, in lines and in memory.
func TestFloodOfManyParties(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out output
		log := Limit(slog.New(slog.NewTextHandler(&out, nil)))
		if Limit(log) != log {
			t.Error("a bounded logger is bounded again")
		}
		for i := range 50_000 {
			log.Warn("refused", "peer", i)
		}
		if n := countLines(&out, "msg=refused"); n != messageBurst {
			t.Errorf("%d lines, want %d", n, messageBurst)
		}
		if n := len(log.Handler().(*handler).limits.messages["refused"].parties); n > maxParties+1 {
			t.Errorf("%d parties are remembered", n)
		}
	})
}

// TestFloodOfPorts checks that a peer is its network, for all ports.
func TestFloodOfPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out output
		log := Limit(slog.New(slog.NewTextHandler(&out, nil)))
		for i := range 5000 {
			log.Warn("reset", "remote", fmt.Sprintf("192.0.2.1:%d", 1024+i), "service", "a")
			log.Warn("reset", "remote", fmt.Sprintf("[2001:db8::%x]:1790", i))
		}
		log.Warn("reset", "remote", "192.0.2.2:1")
		if n := countLines(&out, "reset"); n != 2*partyBurst+1 {
			t.Errorf("%d lines", n)
		}
	})
}
