// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// The second word of map_sync is not 0 while sessions may be at another slot's
// member than where their devices belong, and somebody is to reset them: the
// command that changed where they belong, or weir serve, should it be killed. It
// is another number after every change, so that who is done can tell whether it
// is done with the last one. Who resets holds the lock of the engine's directory.

// ResetsDue is the index of that word.
const ResetsDue = uint32(1) // index

// Owe notes that the change that follows may misplace sessions of a service.
func (e *Engine) Owe(p *record.Service, rate *spec.Rate) error {
	if rate == nil {
		rate = e.Rate
	}
	if rate == nil {
		rate = p.Service.ResetRate
	}
	if rate == nil || *rate == 0 || !p.Service.By.KeepsDevices() {
		return nil // they are to be left
	}
	m := e.Pins.Maps["sync"]
	var due uint32
	if err := m.Lookup(ResetsDue, &due); err != nil {
		return err
	}
	if due++; due == 0 {
		due++
	}
	if err := m.Put(ResetsDue, due); err != nil {
		return fmt.Errorf("noting that sessions may be misplaced: %w", err)
	}
	kernel.Step("steer:owed")
	return nil
}
