// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// KeepSocketHolder has the holder of engine sk_reuseport run, if there is something to hold.
func (e *Engine) KeepSocketHolder() error {
	if e.Kind != spec.EngineReuseport || e.Idle() {
		return nil
	}
	return e.StartSocketHolder()
}

// ReconcileMarked brings what was published into force.
func (e *Engine) ReconcileMarked() error {
	if marked, err := e.marked(); err != nil || !marked {
		return err
	}
	return e.Reconcile()
}

// The holder is a process that owns sockets of weir's and sleeps: those that
// swallow for on_empty: drop, and one in every group of engine sk_reuseport. No
// packet waits for it. Should it be killed, weir apply and weir serve start it
// again; until then empty slots of on_empty: drop reject, and a reuseport group
// whose last member exits is forgotten by the kernel.

// SocketHolderCommand makes the command that runs [holder.Hold]: weir itself. Programs that
// use this package as a library set it, or do without a holder.
var SocketHolderCommand func(root, scope string, kind spec.Engine) *exec.Cmd

// StartSocketHolder starts the holder of an engine unless it runs, and waits until its
// sockets are in place.
func (e *Engine) StartSocketHolder() error {
	if e.socketsHeld() {
		return nil
	}
	if e.Kind == spec.EngineReuseport && e.PokeSocketHolder() {
		if err := e.awaitSocketHolder(e.socketsHeld, nil); err == nil {
			return nil
		}
	}
	return e.spawnSocketHolder(e.socketsHeld)
}

// spawnSocketHolder starts a holder and waits until what is to be there is.
func (e *Engine) spawnSocketHolder(there func() bool) error {
	if SocketHolderCommand == nil {
		return errors.New("a process must hold sockets for this, and steer.HolderCommand is not set: use engine sk_lookup without on_empty: drop")
	}
	cmd := SocketHolderCommand(e.Lock.Path(), e.Scope, e.Kind)
	// A session of its own, and nothing of ours open: it outlives the command that starts it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the holder: %w", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return e.awaitSocketHolder(there, exited)
}

// awaitSocketHolder waits until the holder's sockets are there.
func (e *Engine) awaitSocketHolder(there func() bool, exited <-chan error) error {
	for range 1000 { // a busy machine may take seconds to start it
		if there() {
			return nil
		}
		select {
		case err := <-exited:
			return fmt.Errorf("the holder ended: %v: run weir steer hold --scope %s --engine %s to see why", err, e.Scope, e.Kind)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return errors.New("the holder did not open its sockets within ten seconds")
}

// socketsHeld says whether the holder has all its sockets.
func (e *Engine) socketsHeld() bool {
	ok, err := SocketsHeld(e.Pins, e.Kind)
	return ok && err == nil
}

// SocketsHeld says whether the holder has all its sockets in the maps of an engine.
func SocketsHeld(pins *kernel.Opened, kind spec.Engine) (bool, error) {
	if kind == spec.EngineSkLookup {
		return sinksThere(pins), nil
	}
	groups, err := Entries[GroupKey, GroupValue](pins.Maps["groups"])
	if err != nil {
		return false, err
	}
	for k, v := range groups {
		var cookie uint64
		if k.Proto != 0 && v.Leaving == 0 && pins.Maps["holders"].Lookup(v.SocketHolder, &cookie) != nil {
			return false, nil
		}
	}
	return true, nil
}

// SocketHolderProcess is how a running holder is found: its number and start time.
type SocketHolderProcess struct {
	PID   uint32
	_     uint32
	Start uint64 // clock ticks since boot
}

// PokeSocketHolder wakes the holder of reuseport groups; it says whether there is one.
func (e *Engine) PokeSocketHolder() bool {
	var h SocketHolderProcess
	if e.Pins.Maps["holder"].Lookup(uint32(0), &h) != nil || h.PID == 0 {
		return false
	}
	p, err := pidfd.Open(int(h.PID))
	if err != nil {
		return false
	}
	defer p.Close()
	start, err := pidfd.StartTime(int(h.PID))
	if err != nil || start != h.Start || !p.Alive() {
		return false
	}
	return unix.PidfdSendSignal(p.FD(), unix.SIGHUP, nil, 0) == nil
}
