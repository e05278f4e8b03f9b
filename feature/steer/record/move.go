// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/feature/steer/spec"
)

// maxMoved limits the devices moved by an operator in one service. They are stored with its configuration, in a single
// map value.
const maxMoved = 4096

// ErrNoMove means that a move, drain or undrain is not possible.
var ErrNoMove = errors.New("cannot move")

// Moving is a request of weir steer move.
type Moving struct {
	Device string // address or device name; empty: Bucket
	Bucket int
	To     int
	Back   bool // undo the move
}

// Apply moves a device or a bucket in a record. An error wraps ErrNoMove or ErrNoSlot.
func (m Moving) Apply(p *Service) error {
	if !m.Back && (m.To < 0 || m.To >= p.Service.Slots) {
		return fmt.Errorf("%w: %d: %s has slots 0 to %d", ErrNoSlot, m.To, p.Service.Name, p.Service.Slots-1)
	}
	if !m.Back && p.IsDrained(m.To) {
		return fmt.Errorf("%w: slot %d is drained: weir steer undrain %s --slot %d", ErrNoMove, m.To, p.Service.Name, m.To)
	}
	if m.Device == "" {
		return m.applyBucket(p)
	}
	if !p.Service.By.KeepsDevices() {
		return fmt.Errorf("%w: by: %s does not keep devices in one slot: move a bucket", ErrNoMove, p.Service.By)
	}
	a, err := p.device(m.Device)
	if err != nil {
		return err
	}
	if m.Back {
		if _, ok := p.Moved[a]; !ok {
			return fmt.Errorf("%w: %s has not been moved", ErrNoMove, m.Device)
		}
		delete(p.Moved, a)
		return nil
	}
	if p.Moved == nil {
		p.Moved = map[netip.Addr]int{}
	}
	p.Moved[a] = m.To
	if len(p.Moved) > maxMoved {
		return fmt.Errorf("%w: %d devices are moved already, the maximum: use weights", ErrNoMove, maxMoved)
	}
	return nil
}

func (m Moving) applyBucket(p *Service) error {
	if p.Service.By == spec.ByCPU {
		return fmt.Errorf("%w: by: cpu has no buckets", ErrNoMove)
	}
	if m.Bucket < 0 || m.Bucket >= spec.Buckets {
		return fmt.Errorf("%w: bucket %d: want a number from 0 to %d", ErrNoMove, m.Bucket, spec.Buckets-1)
	}
	was, hand := p.Placed[m.Bucket]
	if m.Back {
		if !hand {
			return fmt.Errorf("%w: bucket %d has not been moved", ErrNoMove, m.Bucket)
		}
		delete(p.Placed, m.Bucket)
		if was.From < p.Service.Slots && !p.IsDrained(was.From) {
			p.Table[m.Bucket] = uint16(was.From)
		} else {
			p.Rebalance()
		}
		return nil
	}
	if !hand {
		was.From = int(p.Table[m.Bucket])
	}
	was.To = m.To
	if p.Placed == nil {
		p.Placed = map[int]PlacedBucket{}
	}
	p.Placed[m.Bucket] = was
	p.Table[m.Bucket] = uint16(m.To)
	return nil
}

// ErrNoSlot means that the service does not have the slot, or the slot has no member.
var ErrNoSlot = errors.New("no such slot")
