// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/lab"
)

// disturb moves the session and kills its collectors in turn, and sometimes kills the plain collector.
func (p *proof) disturb(ctx context.Context, o BMPOptions) error {
	steps := max(o.Moves, o.Kills, o.PlainKills, 1)
	due := func(i, of int) bool { return (i+1)*of/steps > i*of/steps }
	for i := range steps {
		if err := pause(ctx, time.Duration(p.env.Rand.IntN(8000))*time.Microsecond); err != nil {
			return err
		}
		if due(i, o.Moves) {
			if err := p.move(ctx); err != nil {
				return fmt.Errorf("move %d: %w", p.result.Moves, err)
			}
		}
		if due(i, o.Kills) {
			if err := p.kill(ctx); err != nil {
				return fmt.Errorf("kill %d: %w", p.result.Kills, err)
			}
		}
		if due(i, o.PlainKills) {
			if err := p.killPlain(ctx, o.Routes); err != nil {
				return fmt.Errorf("kill %d of the plain collector: %w", p.result.PlainKills, err)
			}
		}
	}
	return nil
}

// move moves the session to the other collector. Every second move is the collector's own, with a state of
// its choice. The others are ordered at the keeper, with the last commit.
func (p *proof) move(ctx context.Context) error {
	s, err := p.owner(ctx)
	if err != nil {
		return err
	}
	from, to := p.members["a"], p.members["b"]
	if s.PID == to.PID {
		from, to = to, from
	}
	id, err := strconv.ParseUint(s.ID, 10, 64)
	if err != nil || s.PID != from.PID {
		return fmt.Errorf("session %s is at process %d, want a collector: %d or %d", s.ID, s.PID, from.PID, to.PID)
	}
	p.result.Moves++
	if p.result.Moves%2 == 0 {
		if err := from.Signal(moveSignal); err != nil {
			return err
		}
		return p.sessionAt(ctx, to, s.Moves) // not timed: it waits for the beginning of a message
	}
	begin := time.Now()
	if err := handoff.Send(ctx, p.socket, p.service, from.name, id, to.name); err != nil {
		return err
	}
	err = p.sessionAt(ctx, to, s.Moves)
	p.durations = append(p.durations, time.Since(begin))
	return err
}

// kill kills the collector with the session, and starts the next one of its name.
func (p *proof) kill(ctx context.Context) error {
	s, err := p.owner(ctx)
	if err != nil {
		return err
	}
	name := "a"
	if s.PID == p.members["b"].PID {
		name = "b"
	}
	if err := p.members[name].kill(); err != nil {
		return err
	}
	p.result.Kills++
	if err := p.startMember(name); err != nil {
		return err
	}
	if err := p.sessionAt(ctx, p.members[name], s.Moves); err != nil {
		return err
	}
	p.result.Rescued++
	return p.await(ctx, p.members[name])
}

// killPlain kills the plain collector, restarts it, and waits until it has the table again.
func (p *proof) killPlain(ctx context.Context, routes int) error {
	if err := p.plain.kill(); err != nil {
		return err
	}
	p.result.PlainKills++
	var err error
	if p.plain, err = p.startPlain("plain", portPlain); err != nil {
		return err
	}
	if err := p.await(ctx, p.plain); err != nil {
		return err
	}
	return p.every(ctx, glance, "the router has sent its table to the plain collector again", func() (bool, error) {
		b, err := p.book(ctx, p.plain)
		if err != nil || b == nil || b.dumps() == 0 {
			return false, err
		}
		p.result.PlainRedumps += int(b.dumps())
		return true, nil
	})
}

// judge compares the collectors' final state with the router's report, and with each other.
func (p *proof) judge(ctx context.Context) error {
	r := p.result
	var mine, witness *book
	var say string
	err := p.every(ctx, glance, "the router has sent everything", func() (bool, error) {
		s, err := p.owner(ctx)
		if err != nil {
			return false, err
		}
		m := p.members["a"]
		if s.PID == p.members["b"].PID {
			m = p.members["b"]
		}
		if mine, err = p.book(ctx, m); err != nil {
			return false, err
		}
		if witness, err = p.book(ctx, p.witness); err != nil {
			return false, err
		}
		if say, err = p.router.Ask(ctx, p.env, "show bmp"); err != nil {
			return false, err
		}
		r.RouterBytes, err = sentTo(say, portA)
		// Statistics arrive once a second: compare at one instant.
		return err == nil && mine != nil && witness != nil && mine.Bytes == r.RouterBytes && mine.complete(r.Routes) && mine.sameTables(witness), err
	})
	if err != nil && mine == nil {
		return err
	}
	wrong := func(format string, a ...any) { r.Wrong++; r.Notes = append(r.Notes, fmt.Sprintf(format, a...)) }
	if err != nil { // a finding, not a failed test
		wrong("%v: sent by the router %d bytes, read by the collector %d; it has %d routes, the witness %d", err, r.RouterBytes, mine.Bytes, mine.routes(), witness.routes())
	}
	r.Messages, r.Bytes, r.Partial = mine.Messages, mine.Bytes, mine.Partial
	_, r.MoveP99, _ = lab.Percentiles(p.durations)
	r.MoveP50, _, _ = lab.Percentiles(p.durations)
	// A process killed before its first commit leaves no trace in the book: the keeper counts all.
	if s, err := p.owner(ctx); err != nil || s.Moves != r.Moves+r.Kills || mine.Moves == 0 || r.Kills > 0 && mine.Crashes == 0 {
		wrong("%d moves and %d kills; the keeper counts %d moves (%v), the session's book %d, %d of them by a crash", r.Moves, r.Kills, s.Moves, err, mine.Moves, mine.Crashes)
	}
	members, err := os.ReadFile(p.journal("members"))
	if err != nil {
		return err
	}
	r.SessionsOpened = bytes.Count(members, []byte("new "))
	for _, line := range bytes.Split(members, []byte("\n")) {
		if bytes.HasPrefix(line, []byte("broken ")) {
			wrong("%s", line)
		}
	}
	repeated := 0
	for _, x := range mine.Peers {
		repeated = max(repeated, int(x.Repetitions))
	}
	r.Redumps = max(r.SessionsOpened, int(mine.Initiations), int(mine.ups()), int(mine.dumps()), 1+repeated/max(r.Routes, 1)) - 1
	plain, err := os.ReadFile(p.journal("plain"))
	r.PlainSessions = bytes.Count(plain, []byte("new "))
	return err
}

// sentTo returns the router's sent bytes on its session to a port of ours: column ByteSent of its table of
// clients. Exactly one such session must exist.
func sentTo(show string, port int) (n uint64, err error) {
	lines := regexp.MustCompile(fmt.Sprintf(`(?m)^ *\S+:%d +\S+:\S+:\S+ +\d+ +\d+ +\d+ +(\d+) +\d+ +\d+`, port)).FindAllStringSubmatch(show, -1)
	if len(lines) != 1 {
		return 0, errors.New("show bmp: want one line for the session:\n" + show)
	}
	return strconv.ParseUint(lines[0][1], 10, 64)
}
