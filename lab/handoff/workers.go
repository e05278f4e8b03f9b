// SPDX-License-Identifier: Apache-2.0

package handofflab

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
)

// workersRole is a server with workers for one request each at a time. A request's work is a wait, so two
// servers' parallel work does not depend on the number of CPUs.
type workersRole struct {
	Keeper    string
	Listen    netip.AddrPort
	Workers   int
	Threshold int // waiting sessions before some move to others; 0: none ever moves
}

// A request is its work in microseconds. The answer is the number of the session's requests so far.
const (
	requestSize = 4
	answerSize  = 4
)

// job is a session with a waiting or running request.
type job struct {
	s      *handoff.Session
	served uint32 // requests before
	work   time.Duration
	rest   int // bytes read behind it
	done   chan bool
}

type workers struct {
	workersRole
	member   *handoff.Member
	balancer *handoff.Balancer

	mu      sync.Mutex
	some    sync.Cond
	waiting []*job
}

func playWorkers(arg string) error {
	w := &workers{}
	if err := json.Unmarshal([]byte(arg), &w.workersRole); err != nil {
		return err
	}
	w.some.L = &w.mu
	l, err := handoff.Listen(context.Background(), "tcp", w.Listen.String(), handoff.Options{Service: service, Name: "0", Keeper: w.Keeper,
		Balances: w.Threshold > 0, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	w.member = l.Member()
	if w.Threshold > 0 {
		w.balancer = &handoff.Balancer{Member: w.member, Threshold: w.Threshold}
		w.member.SetLoad(0)
	}
	for range w.Workers {
		go w.work()
	}
	go func() {
		for {
			s, err := l.AcceptSession()
			if err != nil {
				return
			}
			go func() {
				if err := w.session(s); err != nil && !errors.Is(err, handoff.ErrMoved) {
					fmt.Fprintln(os.Stderr, "session:", err)
				}
			}()
		}
	}()
	say("ready")
	return hear(func([]string) error { return nil })
}

// session handles its requests one after the other.
func (w *workers) session(s *handoff.Session) error {
	var served uint32
	if b := s.State(); len(b) == 4 {
		served = binary.BigEndian.Uint32(b)
	}
	b := make([]byte, 64)
	have := 0
	for {
		for have < requestSize {
			n, err := s.Read(b[have:])
			if errors.Is(err, io.EOF) {
				return s.Close()
			}
			if err != nil {
				return err
			}
			have += n
		}
		j := &job{s: s, served: served, work: time.Duration(binary.BigEndian.Uint32(b)) * time.Microsecond, rest: have - requestSize, done: make(chan bool, 1)}
		w.wait(j)
		if !<-j.done {
			return handoff.ErrMoved
		}
		served++
		have = copy(b, b[requestSize:have])
	}
}

// wait queues a request for a worker, and moves a session to another server if too many wait.
func (w *workers) wait(j *job) {
	w.mu.Lock()
	w.waiting = append(w.waiting, j)
	w.some.Signal()
	n := len(w.waiting)
	w.mu.Unlock()
	if w.balancer == nil {
		return
	}
	w.member.SetLoad(n)
	for {
		to := w.balancer.Where(n)
		if to == "" {
			return
		}
		g := w.takeLast()
		if g == nil {
			w.balancer.GaveNot(to)
			return
		}
		n--
		go w.give(g, to)
	}
}

// takeLast removes the session with the longest expected wait from the queue, except sessions just arrived.
func (w *workers) takeLast() *job {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := len(w.waiting) - 1; i >= 0; i-- {
		if j := w.waiting[i]; !w.balancer.Rests(j.s) {
			w.waiting = append(w.waiting[:i], w.waiting[i+1:]...)
			return j
		}
	}
	return nil
}

func (w *workers) give(j *job, to string) {
	state := binary.BigEndian.AppendUint32(nil, j.served)
	err := w.member.TransferExcept(j.s, to, requestSize+j.rest, state)
	if err == nil {
		j.done <- false
		return
	}
	w.balancer.GaveNot(to)
	if errors.Is(err, handoff.ErrMoved) {
		j.done <- false
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting = append([]*job{j}, w.waiting...)
	w.some.Signal()
}

// work serves one request after the other.
func (w *workers) work() {
	for {
		w.mu.Lock()
		for len(w.waiting) == 0 {
			w.some.Wait()
		}
		j := w.waiting[0]
		w.waiting = w.waiting[1:]
		n := len(w.waiting)
		w.mu.Unlock()
		if w.balancer != nil {
			w.member.SetLoad(n)
		}
		time.Sleep(j.work)
		answer := binary.BigEndian.AppendUint32(nil, j.served+1)
		_, err := j.s.Write(answer)
		if err == nil {
			err = j.s.CommitExcept(j.rest, answer)
		}
		if err != nil && !errors.Is(err, handoff.ErrMoved) {
			fmt.Fprintln(os.Stderr, "serve:", err)
		}
		j.done <- err == nil
	}
}
