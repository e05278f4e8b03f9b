// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/weir-project/weir/kernel"
)

// Status is the displayed state of all features. Its JSON has a key for each feature with something to show, beside
// faults, unconfirmed and half_done.
type Status struct {
	Faults      []kernel.Fault // damage to the pins, and foreign programs
	Unconfirmed *Unconfirmed   // change made by weir apply --confirm
	HalfDone    *HalfDone      // change made in part by a killed weir apply or weir remove
	parts       map[string]any // by feature: its Report, or its JSON from weir serve
}

// keys of Status that are not features
const (
	faultsKey      = "faults"
	unconfirmedKey = "unconfirmed"
	halfDoneKey    = "half_done"
)

// Part returns a feature's part with the type of the feature's report. ok is false if it shows nothing.
func Part[T any](s Status, name string) (part T, ok bool) {
	switch v := s.parts[name].(type) {
	case nil:
		return part, false
	case T:
		return v, true
	case json.RawMessage:
		return part, json.Unmarshal(v, &part) == nil
	}
	return part, false
}

// Err returns the unreadable instances as an error, or nil.
func (s Status) Err() error {
	var errs []error
	for _, name := range Features() {
		if x, ok := s.Part(name).(interface{ Err() error }); ok {
			errs = append(errs, x.Err())
		}
	}
	return errors.Join(errs...)
}

// Part returns a feature's part without a static type: the feature's state or its report. It is nil if the feature shows
// nothing.
func (s Status) Part(name string) any {
	raw, ok := s.parts[name].(json.RawMessage)
	if !ok {
		return s.parts[name]
	}
	if some, err := named(name); err == nil && len(some) == 1 {
		part := some[0].NewState()
		if json.Unmarshal(raw, part) == nil {
			return part
		}
	}
	return raw
}

// MarshalJSON implements json.Marshaler.
func (s Status) MarshalJSON() ([]byte, error) {
	out := map[string]any{}
	for name, part := range s.parts {
		out[name] = part
	}
	if len(s.Faults) > 0 {
		out[faultsKey] = s.Faults
	}
	if s.Unconfirmed != nil {
		out[unconfirmedKey] = s.Unconfirmed
	}
	if s.HalfDone != nil {
		out[halfDoneKey] = s.HalfDone
	}
	return json.Marshal(out)
}

// UnmarshalJSON implements json.Unmarshaler. Parts stay JSON until [Part] decodes them.
func (s *Status) UnmarshalJSON(text []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return err
	}
	*s = Status{parts: map[string]any{}}
	for key, value := range all {
		var err error
		switch key {
		case faultsKey:
			err = json.Unmarshal(value, &s.Faults)
		case unconfirmedKey:
			err = json.Unmarshal(value, &s.Unconfirmed)
		case halfDoneKey:
			err = json.Unmarshal(value, &s.HalfDone)
		default:
			s.parts[key] = value
		}
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// Shown lists the features with something to show.
func (s Status) Shown() []string { return slices.Sorted(maps.Keys(s.parts)) }
