// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// The second word of map_sync is nonzero while sessions may be misplaced: held by another member than their device's
// slot. They are due to be reset, by the changing command or, after its death, by weir serve. Every change writes a new
// number. The resetting process compares it to detect a newer change. It holds the lock of the engine's directory.

// ResetsDue is the index of this word in map_sync.
const ResetsDue = uint32(1)

// Owe records that the next change may misplace sessions of a service.
func (e *Engine) Owe(p *record.Service, rate *spec.Rate) error {
	if rate == nil {
		rate = e.Rate
	}
	if rate == nil {
		rate = p.Service.ResetRate
	}
	if rate == nil || *rate == 0 || !p.Service.By.KeepsDevices() {
		return nil // resets are disabled or do not apply
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
		return fmt.Errorf("record due resets: %w", err)
	}
	kernel.Step("steer:owed")
	return nil
}
